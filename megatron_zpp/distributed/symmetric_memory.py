"""Memory that NCCL transfers with the copy engines, which leaves all multiprocessors to the compute.

NCCL's kernels occupy multiprocessors, while a concurrent matrix product is tiled for all of them. All-gathers
and all-to-alls use the copy engines instead if their buffers are registered at the same offsets on every rank
("symmetric"), on a communicator without thread blocks ("zero CTA"), among the GPUs of one node (NCCL user
guide, "Zero-CTA Optimization", since 2.28).
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_zpp.mesh import Mesh

OFF = "NCCL_CUMEM_ENABLE"  # 0: NCCL allocates no memory that other processes could open
_FIRST_NCCL = (2, 28)


def may_have_copy_engines(mesh: Mesh, device: torch.device) -> bool:
    """Return whether copy engines could move what the ranks send; the same on all ranks."""
    return device.type == "cuda" and mesh.replicas.size > 1 and dist.get_backend() == "nccl"


def check_nccl() -> None:
    """Raise RuntimeError unless torch and NCCL of this rank support transfers by copy engines."""
    if os.environ.get(OFF) == "0":
        raise RuntimeError(f"{OFF} is 0")
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        raise RuntimeError(f"torch {torch.__version__} has no zero-CTA policy")
    version = torch.cuda.nccl.version()
    if version < _FIRST_NCCL:
        found, first = (".".join(map(str, numbers)) for numbers in (version, _FIRST_NCCL))
        raise RuntimeError(f"NCCL is {found}; needs {first}")


class SymmetricMemory:
    """A communicator without thread blocks, and the memory that is registered with it."""

    def __init__(self, ranks: Sequence[int], device: torch.device, timeout: timedelta | None) -> None:
        options = dist.ProcessGroupNCCL.Options()
        zero_cta = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]  # not in stubs
        options.config.cta_policy = zero_cta  # type: ignore[attr-defined]  # missing from torch's stubs
        if timeout is not None:
            options._timeout = timeout  # torch warns if it differs from the one given to new_group
        self.group = dist.new_group(
            ranks, timeout=timeout, pg_options=options, use_local_synchronization=True
        )
        far = torch.tensor([0.0 if writes_all(ranks, device) else 1.0], device=device)
        dist.all_reduce(far, group=self.group)  # also initialises the communicator, as registering needs
        self.peers_write = far.item() == 0
        self._backend = self.group._get_backend(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context whose allocations are in this memory: equal on all ranks, before `register`."""
        return torch.cuda.use_mem_pool(self._pool)

    def register(self) -> None:
        """Register all allocations with NCCL, collectively; later allocations are not registered."""
        self._backend.register_mem_pool(self._pool, symm=True)

    def abort(self) -> None:
        """Abort the communicator, which waits for no other rank.

        Torch reports an error if memory is registered (it calls ncclCommDeregister for windows too).
        """
        with suppress(dist.DistBackendError):
            dist.distributed_c10d._abort_process_group(self.group)

    def close(self) -> None:
        """Undo `register`. To be called before the buffers are freed."""
        torch.cuda.synchronize()  # the last step has started gathers for the next one
        self._backend.deregister_mem_pool(self._pool)


def shared_buffer(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[Tensor, Any]:
    """Return memory (nbytes,) uint8 that all GPUs of `group` can write, and torch's handle of all of theirs.

    Torch makes no NVLink multicast object for it: copies need none, and making one fails on some machines.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    mine = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return mine, symmetric_memory.rendezvous(mine, group)


def peer_memory(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> list[Tensor]:
    """Return memory (nbytes,) uint8 on each GPU of `group`, by group rank, that this GPU can write."""
    mine, handle = shared_buffer(group, device, nbytes)
    return [
        mine if group_rank == handle.rank else handle.get_buffer(group_rank, (nbytes,), torch.uint8)
        for group_rank in range(handle.world_size)
    ]


def writes_all(ranks: Sequence[int], device: torch.device) -> bool:
    """Return whether this GPU can write the memory of the others: all are visible and allow peer access."""
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    reached = all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    return len(others) + 1 >= len(ranks) and reached
