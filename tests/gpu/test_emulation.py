"""The emulator of benchmarks/convergence.py on a GPU against ranks over NCCL, bit for bit."""

import os

import pytest
import torch

from benchmarks.emulation.emulated_run import RunSettings, train
from benchmarks.emulation.rungs import RUNGS
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.setup.determinism import fix_order_of_sums
from megatron_zpp.zero import difference_formats
from tests.benchmarks.test_emulation import EVERYWHERE, Case, emulated, with_engine
from tests.gpu.ranks import largest_in_core, on_gpus

NODES = 2
CASES: list[Case] = [(name, bf16, 1.0, NODES) for name in ("today", EVERYWHERE) for bf16 in (False, True)]
pytestmark = pytest.mark.usefixtures("deterministic")


def real(topology: Topology, micro_batches: int) -> list[dict[str, str]]:
    fix_order_of_sums(os.environ)
    return with_engine(topology, CASES, difference_formats.LOST_SHARE, micro_batches)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.gpu_long), 3])
@pytest.mark.parametrize(("nodes", "local"), largest_in_core((NODES, 1), (NODES, 2)))
def test_final_weights_are_those_of_real_ranks(nodes: int, local: int, micro_batches: int) -> None:
    first, *others = on_gpus(nodes, local, real, micro_batches)
    assert all(other == first for other in others)
    gpu = torch.device("cuda", 0)
    found = [emulated(case, nodes * local, micro_batches, gpu) for case in CASES]
    assert [case for case, one, other in zip(CASES, first, found, strict=True) if one != other] == []


def test_cuda_graphs_change_no_bit() -> None:
    """Of a run, with Muon in two islands."""
    gpu = torch.device("cuda", 0)
    found = []
    for graphs in (False, True):
        settings = RunSettings(
            size="tiny",
            steps=6,
            eval_samples=8,
            ranks_per_node=1,
            graphs=graphs,
            attention="flash",
            muon={},
            islands={"interval": 2, "bits": 4},
        )
        operations = load_operations("cuda", require_kernels=True, say=print)
        found.append(train(settings, RUNGS["baseline"], 0, device=gpu, operations=operations))
    assert found[0]["sha256"] == found[1]["sha256"]
    assert found[0]["train"] == found[1]["train"]
