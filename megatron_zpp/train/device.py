"""What a run computes with: its device, and whose kernels. What these cannot obey is refused here."""

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_zpp.config.fused_backend import resolve_fused_backend
from megatron_zpp.config.root import Config
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication import check_topology
from megatron_zpp.zero.process_group import select_device
from megatron_zpp.zero.topology import Topology


@dataclass(frozen=True)
class Device:
    """`operations` are None where nothing is quantised and torch's own kernels serve."""

    device: torch.device
    fused_backend: Literal["apex", "torch"]
    operations: Operations | None

    def settings(self) -> dict[str, dict[str, Any]]:
        """What all ranks must have found alike: their states are to stay equal bit for bit."""
        compiled = self.operations is not None and self.operations.compiled
        return {"kernels": {"fused_backend": self.fused_backend, "compiled": compiled}}


def prepare_device(config: Config, topology: Topology) -> Device:
    """Chooses this rank's device, which is not taken yet, and builds the kernels where they are needed.

    Raises ValueError for settings that need another device or other ranks, BuildError for --require-kernels
    without a compiler.
    """
    check_topology(config.zero, topology)
    device = select_device(config.distributed.device, topology)
    config.recompute.check_device(device.type)
    backend = resolve_fused_backend(config.optimizer, config.zero, device.type)
    return Device(device, backend, _operations(config, device, topology))


def _operations(config: Config, device: torch.device, topology: Topology) -> Operations | None:
    """On CPUs torch's own kernels take a plain step as fast, and nobody has to wait for a compiler."""
    required, quantizes = config.distributed.require_kernels, config.zero.quantizes
    if not (required or quantizes or device.type == "cuda"):
        return None

    def say(line: str) -> None:
        if topology.local_rank == 0:
            sys.stderr.write(f"{line}\n")

    operations = load_operations(device.type, require_kernels=required, say=say)
    return operations if operations.compiled or quantizes else None
