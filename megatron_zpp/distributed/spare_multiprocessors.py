"""Makes matrix products leave multiprocessors to the kernels with which NCCL sends between nodes.

A product of cuBLAS on Hopper starts as many thread blocks as the GPU has multiprocessors, and gives each of
them as many tiles. A kernel of NCCL holds its multiprocessors for as long as the network takes. The blocks
that find none begin when others have ended, and the product takes up to twice its time. A product that is
told of fewer multiprocessors starts fewer blocks, and all of them begin at once.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
import torch.distributed as dist

from megatron_zpp.distributed.nccl_network import other_network, read_nccl_settings, read_network

# NCCL's kernels have two thread blocks each over TCP, and two of them send at a time.
_OVER_TCP = 4
_HOPPER = 9  # the major number of the compute capability
_CARVEOUT = "_set_sm_carveout_experimental"  # of torch, for products by cuBLASLt of all threads


class SpareMultiprocessors:
    """Products of one device that leave `count` of its multiprocessors free; 0: they may use all."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self._device = count, device
        if not count:
            return
        self._target = torch.cuda.get_device_properties(device).multi_processor_count - count
        self._cublas = _cublas()
        self._thread = threading.local()
        _quietly(lambda: getattr(torch._C, _CARVEOUT)(count))

    def reserve(self) -> None:
        """Tell cuBLAS, for the products that this thread submits from now on.

        torch has a handle of cuBLAS for each thread, and the backward has a thread of its own. Newer versions
        of torch tell cuBLAS themselves before each product, and then this changes nothing.
        """
        if not self.count or getattr(self._thread, "told", False):
            return
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        status = self._cublas.cublasSetSmCountTarget(handle, ctypes.c_int(self._target))
        if status != 0:
            raise RuntimeError(f"cublasSetSmCountTarget({self._target}) failed with status {status}")
        self._thread.told = True

    def reserve_in_backward_of(self, loss: torch.Tensor) -> None:
        """Let the thread of the backward of `loss` call `reserve`."""
        if self.count:
            loss.register_hook(lambda _: self.reserve())

    def close(self) -> None:
        """Let the products of this thread and of backwards use all multiprocessors again."""
        if not self.count:
            return
        getattr(torch._C, _CARVEOUT)(None)
        self._target, self._thread = 0, threading.local()  # 0: all
        self.reserve()
        with torch.enable_grad():
            loss = torch.zeros((), device=self._device, requires_grad=True) * 1
            self.reserve_in_backward_of(loss)
            loss.backward()


def spare_multiprocessors(
    nodes: int, device: torch.device, environment: Mapping[str, str]
) -> SpareMultiprocessors:
    """What NCCL needs between so many nodes.

    All ranks of the job must call it, and all get the least number that suits one of them.
    """
    if nodes == 1 or device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return SpareMultiprocessors(0, device)
    settings = read_nccl_settings(environment)
    over_tcp = other_network(settings, read_network()) is None
    count = torch.tensor(count_for(torch.cuda.get_device_capability(device), over_tcp), device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return SpareMultiprocessors(int(count.item()), device)


def count_for(capability: tuple[int, int], over_tcp: bool) -> int:
    """How many multiprocessors products leave to NCCL between nodes, where that was measured to pay."""
    if not (over_tcp and capability[0] == _HOPPER and torch.version.cuda and hasattr(torch._C, _CARVEOUT)):
        return 0
    try:
        _cublas()
    except OSError:
        return 0
    return _OVER_TCP


def _cublas() -> ctypes.CDLL:
    """The library, which torch has loaded. Raises OSError if the loader does not find it."""
    return ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")


def _quietly(call: Callable[[], object]) -> None:
    """Call what lets torch write to stderr, once per process, that it is experimental; drop this line."""
    written = os.memfd_create("stderr")
    stderr = os.dup(2)
    try:
        os.dup2(written, 2)
        call()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with os.fdopen(written, "rb") as file:
            file.seek(0)
            others = [line for line in file if b"SM carveout" not in line]  # by other threads
        if others:
            with suppress(OSError):  # the log's disk may be full
                os.write(2, b"".join(others))
