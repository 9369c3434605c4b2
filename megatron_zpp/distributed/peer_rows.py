"""Rows that the tensor ranks of a node write into each other's memory, beside products.

A transfer is a copy, which a GPU's copy engines make over NVLink. That a rank's memory is free, and that rows
have arrived, is said by a number that streams write and wait for (CUDA driver API, "Stream Memory
Operations"). Neither takes a multiprocessor from the products beside it; a collective of NCCL is a kernel
that does, and that waits for the end of a product which occupies all of them.

Each rank has two regions (T, R, D), a part for what each rank sends: one for rows that are gathered, one for
products that are summed. An exchange begins with all ranks saying that theirs are free, for which what read
them before must be enqueued on the current stream by then. No number is therefore kept from one exchange to
the next.

On CPUs the same exchanges are collectives, which nothing runs beside.

Shapes: T ranks, R rows of a rank, D width.
"""

import ctypes
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.symmetric_memory import shared_buffer, writes_all
from megatron_zpp.distributed.tensor_group import TensorGroup

_GATHERED, _SUMMED = range(2)  # the regions
_FREE = 2  # beside the two: numbers that say that a region has arrived
_FLAGS = 1024  # bytes of torch's signal pad before ours, which torch's own barriers would use
_WAIT_EQUAL, _WRITE = 1, 0  # CU_STREAM_WAIT_VALUE_EQ, CU_STREAM_WRITE_VALUE_DEFAULT


def begin(group: TensorGroup, rows: int, width: int, like: Tensor) -> "PeerRows":
    """Begin the exchanges of an operator, of rows (`rows`, `width`) with the type and device of `like`."""
    kind = CopiedRows if like.is_cuda else CollectiveRows
    return kind(group, rows, width, like)


def region_bytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the two regions of a rank."""
    return 2 * ranks * rows * width * dtype.itemsize


def can_copy(group: TensorGroup, device: torch.device) -> bool:
    """Whether the GPUs of `group` can write to each other's memory; the same on all ranks, which all ask."""
    far = torch.tensor([0.0 if writes_all(group.ranks, device) else 1.0], device=device)
    return group.sum(far).item() == 0


def allocate(group: TensorGroup, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate the regions and try an exchange, as all ranks must. Raises RuntimeError or OSError."""
    own = torch.zeros(rows, width, dtype=dtype, device=device)
    peers = CopiedRows(group, rows, width, own)
    peers.gather(own)
    for rank in own_first(group)[1:]:
        peers.rows_of(rank)
    torch.cuda.synchronize(device)


def own_first(group: TensorGroup) -> list[int]:
    """This rank and then the others, in the order in which what they send arrives."""
    return [(group.rank - distance) % group.size for distance in range(group.size)]


def others_first(group: TensorGroup) -> list[int]:
    """The others, in the order in which all ranks send to different ones, and then this rank."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size + 1)]


class CopiedRows:
    """The exchanges of one operator, which all ranks of a group begin alike, by copies between GPUs."""

    def __init__(self, group: TensorGroup, rows: int, width: int, like: Tensor) -> None:
        from torch.distributed._symmetric_memory import _get_backend_stream

        self._group, self._stream = group, _get_backend_stream()
        self._memory = _memory(group.process_group, region_bytes(group.size, rows, width, like.dtype))
        self._pads = self._memory.signal_pad_ptrs
        self._shape, self._dtype = (group.size, rows, width), like.dtype
        self._there: dict[tuple[int, int], torch.cuda.Event] = {}  # by region and rank
        self._sent: list[Tensor] = []
        self._after_kernels()
        self._tell(_FREE)
        for peer in others_first(group)[:-1]:
            self._hear(_FREE, peer)

    def gather(self, rows: Tensor, *, whole: bool = False) -> None:
        """Send the own rows (R, D) to all ranks; `whole`: keep them for `gathered` too."""
        self._after_kernels()
        with torch.cuda.stream(self._stream):
            for peer in others_first(self._group)[:-1]:
                self._region(_GATHERED, peer)[self._group.rank].copy_(rows)
                self._tell(_GATHERED, peer)
            if whole:
                self._region(_GATHERED, self._group.rank)[self._group.rank].copy_(rows)
        self._arrive(_GATHERED)

    def rows_of(self, rank: int) -> Tensor:
        """The rows (R, D) that another rank has sent; the current stream waits for them."""
        self._there[_GATHERED, rank].wait()
        return self._region(_GATHERED, self._group.rank)[rank]

    def gathered(self) -> Tensor:
        """The rows of all ranks (T · R, D), for which the current stream waits."""
        for rank in own_first(self._group)[1:]:
            self._there[_GATHERED, rank].wait()
        return self._region(_GATHERED, self._group.rank).flatten(0, 1)

    def send(self, rows: Tensor, rank: int) -> None:
        """Send (R, D), this rank's part of what another will sum. They must stay until `sum`."""
        self._sent.append(rows)
        self._after_kernels()
        with torch.cuda.stream(self._stream):
            self._region(_SUMMED, rank)[self._group.rank].copy_(rows)
        self._tell(_SUMMED, rank)
        if len(self._sent) == self._group.size - 1:
            self._arrive(_SUMMED)

    def own(self) -> Tensor:
        """Where to put this rank's part of what it will sum (R, D)."""
        return self._region(_SUMMED, self._group.rank)[self._group.rank]

    def sum(self) -> Tensor:
        """The sum (R, D) of the parts of all ranks, rounded once; the current stream waits for it."""
        for rank in own_first(self._group)[1:]:
            self._there[_SUMMED, rank].wait()
        parts = self._region(_SUMMED, self._group.rank)
        return parts[0] + parts[1] if len(parts) == 2 else parts.sum(0)  # the same bits, faster

    def _region(self, region: int, rank: int) -> Tensor:
        numel = self._shape[0] * self._shape[1] * self._shape[2]
        return self._memory.get_buffer(rank, self._shape, self._dtype, region * numel)

    def _after_kernels(self) -> None:
        """Let what follows on the stream of copies begin after what the current stream has so far."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def _arrive(self, region: int) -> None:
        """Let the stream of copies wait for what each rank sends to a region, by rank."""
        for rank in own_first(self._group)[1:]:
            self._hear(region, rank)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._there[region, rank] = event

    def _tell(self, what: int, *ranks: int) -> None:
        """Say it to `ranks`, or to all others, after what the stream of copies has so far."""
        for rank in ranks or others_first(self._group)[:-1]:
            _write(self._stream, self._flag(rank, what, self._group.rank), 1)

    def _hear(self, what: int, rank: int) -> None:
        """Let the stream of copies wait until a rank has said it."""
        address = self._flag(self._group.rank, what, rank)
        _wait_for(self._stream, address, 1)
        _write(self._stream, address, 0)

    def _flag(self, holder: int, what: int, speaker: int) -> int:
        """The address of the number in the memory of `holder`."""
        return self._pads[holder] + _FLAGS + 4 * (what * self._group.size + speaker)


class CollectiveRows:
    """As CopiedRows, by collectives."""

    def __init__(self, group: TensorGroup, rows: int, width: int, like: Tensor) -> None:
        self._group = group
        self._received = like.new_empty(group.size, rows, width)
        self._parts = like.new_empty(group.size, rows, width)

    def gather(self, rows: Tensor, *, whole: bool = False) -> None:
        self._group.gather_into(self._received.flatten(0, 1), rows)

    def rows_of(self, rank: int) -> Tensor:
        return self._received[rank]

    def gathered(self) -> Tensor:
        return self._received.flatten(0, 1)

    def send(self, rows: Tensor, rank: int) -> None:
        self._parts[rank] = rows

    def own(self) -> Tensor:
        return self._parts[self._group.rank]

    def sum(self) -> Tensor:
        return self._group.exchange_parts(self._parts).sum(0)


PeerRows: TypeAlias = CopiedRows | CollectiveRows


@cache
def _memory(group: dist.ProcessGroup, nbytes: int) -> Any:
    """Memory of all ranks of a group that each can write; it stays, as the group does."""
    return shared_buffer(group, torch.device("cuda", torch.cuda.current_device()), nbytes)[1]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _write(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Let a stream write 32 bits, after all that its earlier work has written can be seen."""
    _call("cuStreamWriteValue32_v2", stream, address, value, _WRITE)


def _wait_for(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Let a stream wait until these 32 bits are `value`."""
    _call("cuStreamWaitValue32_v2", stream, address, value, _WAIT_EQUAL)


def _call(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    arguments = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value)
    if status := getattr(_driver(), name)(*arguments, ctypes.c_uint(flags)):
        raise RuntimeError(f"{name} failed with CUDA error {status}")
