"""Makes matrix products leave multiprocessors to the kernels with which NCCL sends between nodes.

A product of cuBLAS on Hopper starts as many thread blocks as the GPU has multiprocessors, and gives each of
them as many tiles. A kernel of NCCL holds its multiprocessors for as long as the network takes. The blocks
that find none begin when others have ended, and the product takes up to twice its time. A product that is
told of fewer multiprocessors starts fewer blocks, and all of them begin at once.
"""

import ctypes
import threading
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.nccl_network import other_network, read_nccl_settings, read_network
from megatron_zpp.distributed.topology import Topology

FLAG = "--zero-spare-multiprocessors"
# NCCL's kernels have two thread blocks each over TCP, and two of them send at a time.
_OVER_TCP = 4
_HOPPER = 9  # the major number of the compute capability


class SpareMultiprocessors:
    """Products of one device that leave `count` of its multiprocessors free; 0: they may use all."""

    def __init__(self, count: int, device: torch.device) -> None:
        """Raises ValueError if the device has no more than `count`, or if cuBLAS cannot be told."""
        self.count = count
        if not count:
            return
        have = torch.cuda.get_device_properties(device).multi_processor_count
        if count >= have:
            raise option_error(FLAG, count, f"the GPU has {have} multiprocessors; give fewer")
        self._target = have - count
        try:
            self._cublas = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        except OSError as error:
            raise option_error(FLAG, count, f"needs the library of cuBLAS ({error}); give 0") from None
        self._thread = threading.local()
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # that it is experimental
            torch._C._set_sm_carveout_experimental(count)  # for products by cuBLASLt, of all threads

    def reserve(self) -> None:
        """Tell cuBLAS, for the products that this thread submits from now on.

        torch has a handle of cuBLAS for each thread, and the backward has a thread of its own.
        """
        if not self.count or getattr(self._thread, "told", False):
            return
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        status = self._cublas.cublasSetSmCountTarget(handle, ctypes.c_int(self._target))
        if status != 0:
            raise RuntimeError(f"cublasSetSmCountTarget({self._target}) failed with status {status}")
        self._thread.told = True

    def close(self) -> None:
        """Let products by cuBLASLt use all multiprocessors again."""
        if self.count:
            torch._C._set_sm_carveout_experimental(None)


def spare_multiprocessors(
    setting: str, topology: Topology, device: torch.device, environment: Mapping[str, str]
) -> SpareMultiprocessors:
    """What --zero-spare-multiprocessors `setting` asks for; `topology` is that of the data ranks.

    Raises ValueError if a number that was given cannot be obeyed.
    """
    if setting != "auto":
        if device.type != "cuda" and setting != "0":
            raise option_error(FLAG, setting, f"needs GPUs, and this run is on a {device.type}; give 0")
        return SpareMultiprocessors(int(setting), device)
    if topology.nodes == 1 or device.type != "cuda" or dist.get_backend() != "nccl":
        return SpareMultiprocessors(0, device)
    settings = read_nccl_settings(environment)
    over_tcp = other_network(settings, read_network(settings)) is None
    return SpareMultiprocessors(auto_count(torch.cuda.get_device_capability(device), over_tcp), device)


def auto_count(capability: tuple[int, int], over_tcp: bool) -> int:
    """How many multiprocessors products leave to NCCL between nodes, where that was measured to pay."""
    return _OVER_TCP if capability[0] == _HOPPER and over_tcp and torch.version.cuda is not None else 0
