"""What the tests of ZeRO++ run on: they are the same on CPUs and, from tests/gpu, on GPUs."""

import torch
import torch.distributed as dist

from megatron_zpp.distributed.symmetric_memory import may_have_copy_engines
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations


def this_device() -> torch.device:
    """The GPU of this rank where it talks through NCCL (tests/gpu runs these tests too)."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def copy_engines(mesh: Mesh) -> bool:
    """Whether communication streams inside a node can use them; CPUs have none."""
    return may_have_copy_engines(mesh, this_device())


def operations() -> Operations:
    """The kernels, or the oracle where there is no compiler."""
    return load_operations(this_device().type, require_kernels=False, say=print)
