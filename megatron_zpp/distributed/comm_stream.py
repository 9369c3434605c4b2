"""Communication streams, each a communicator and a queue of collectives that overlap with the compute.

Submitted work waits for all compute that was submitted before it, and overlaps with compute that is
submitted later. On a GPU a communication stream is a CUDA stream; on a CPU it is a thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.symmetric_memory import SymmetricMemory, peer_memory
from megatron_zpp.distributed.tensor_group import all_gather_single
from megatron_zpp.mesh import Mesh


class Pending:
    """A handle of submitted work.

    It does not own the buffers of the work: on a GPU it holds an event alone. Whoever submits work keeps its
    buffers until `wait` has returned, as UnitGradient (zero/sharded_unit.py) does.
    """

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Make the current CUDA stream (on a CPU: the caller) wait for the result; repeatable."""
        self._wait()


def all_of(pending: Sequence[Pending]) -> Pending:
    """Wait for each of them, because each can fail: on a CPU only `wait` raises the error of work."""

    def wait() -> None:
        for one in pending:
            one.wait()

    return Pending(wait)


class TrafficLedger:
    """Bytes sent since the last `take`: to ranks of this node, and to ranks of other nodes."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._near = mesh.rank, set(mesh.ranks(*mesh.inside_node))
        self.intra_node = self.inter_node = 0

    def count(self, rank: int, nbytes: int) -> None:
        """Count `nbytes` to a rank; what this rank keeps is not sent."""
        if rank not in self._near:
            self.inter_node += nbytes
        elif rank != self._rank:
            self.intra_node += nbytes

    def take(self) -> tuple[int, int]:
        """Return (bytes inside the node, bytes between nodes) since the last call."""
        taken = self.intra_node, self.inter_node
        self.intra_node = self.inter_node = 0
        return taken


class CommStream:
    """Runs collectives of `ranks` in order. All of these ranks must submit the same collectives."""

    def __init__(
        self,
        ranks: Sequence[int],
        mesh: Mesh,
        device: torch.device,
        ledger: TrafficLedger,
        timeout: timedelta | None,
        *,
        copy_engines: bool = False,
    ) -> None:
        """Create the communicator. All of `ranks` must do so.

        `timeout`: after which an unfinished collective is an error; None: torch's default.
        `copy_engines`: use them if all ranks are on one node (see `choose_copy_engines`).
        """
        self.ranks, self._device, self._ledger = tuple(ranks), device, ledger
        self.group_rank = self.ranks.index(mesh.rank)
        self._two_nodes = len(self.ranks) == 2 and not mesh.share_a_node(self.ranks)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._symmetric: SymmetricMemory | None = None
        self._group: dist.ProcessGroup | None = None
        if len(self.ranks) > 1:
            if copy_engines and mesh.share_a_node(self.ranks):
                self._symmetric = SymmetricMemory(self.ranks, device, timeout)
                self._group = self._symmetric.group
            else:
                self._group = dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True)
        beside = self._stream is None and self._group is not None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="comm_stream") if beside else None
        self._newest: Future | None = None
        self._barrier_buffers: tuple[Tensor, Tensor] | None = None  # received and sent by `barrier`

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer (numel,) for collectives of this stream. All ranks must allocate the same."""
        with nullcontext() if self._symmetric is None else self._symmetric.allocating():
            return torch.zeros(numel, dtype=dtype, device=self._device)

    @property
    def writes_peers(self) -> bool:
        """Whether this rank's copy engines can write the memory of the others; the same on all ranks."""
        return self._symmetric is not None and self._symmetric.peers_write

    def peer_buffers(self, nbytes: int) -> list[Tensor]:
        """Return a buffer (nbytes,) uint8 on each rank, by group rank; requires `writes_peers`.

        All ranks must request the same size.
        """
        assert self._symmetric is not None
        received, sent = (self.zeros(len(self.ranks), torch.float32) for _ in range(2))
        self._barrier_buffers = received, sent
        return peer_memory(self._symmetric.group, self._device, nbytes)

    def ready(self) -> None:
        """Register the buffers. To be called after the last `zeros` and before the first collective."""
        if self._symmetric is not None:
            self._symmetric.register()

    def close(self) -> None:
        """End the thread and deregister the buffers. To be called before the buffers are freed."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._symmetric is not None:
            self._symmetric.close()

    def submit(self, work: Callable[[], object]) -> Pending:
        """Queue `work`, which calls the collectives below, to overlap with what the caller does next."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
                done = self._stream.record_event()
            return Pending(lambda: torch.cuda.current_stream().wait_event(done))
        if self._thread is None:
            work()
            return Pending()

        def run() -> None:
            work()  # whose result a future would keep

        self._newest = self._thread.submit(run)
        return Pending(self._newest.result)

    def settle(self) -> None:
        """Wait until the ledger contains all submitted work; on a GPU, and on one rank, it always does."""
        if self._newest is not None:
            self._newest.result()

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """Fill `full` (ranks · n,) with every rank's `shard` (n,), which may lie in its place in `full`."""
        if self._group is None:
            copy(full, shard)
            return
        others = len(self.ranks) - 1  # all parts go around a ring
        self._ledger.count(self.ranks[(self.group_rank + 1) % len(self.ranks)], others * shard.nbytes)
        # `wait` blocks the CUDA stream, or the thread.
        all_gather_single(full, shard, group=self._group, async_op=True).wait()

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send part r of `sent` (ranks · n,) to group rank r, and receive part r of `received` from it.

        Between two nodes an all-gather of the parts for the other rank does it with as many bytes. NCCL's
        messages are longer there, which is faster over TCP (docs/internals/communication.md).
        """
        if self._group is None:
            copy(received, sent)
            return
        for rank in self.ranks:
            self._ledger.count(rank, sent.nbytes // len(self.ranks))
        if not self._two_nodes:
            dist.all_to_all_single(received, sent, group=self._group, async_op=True).wait()
            return
        parts = sent.chunk(2)
        all_gather_single(received, parts[1 - self.group_rank], group=self._group, async_op=True).wait()
        received.chunk(2)[self.group_rank].copy_(parts[self.group_rank])

    def exchange(self, received: Tensor, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]]) -> None:
        """An all-to-all of bytes (n,), so many from each rank and to each rank: `counts`."""
        if self._group is None:
            return
        for rank, nbytes in zip(self.ranks, counts[1], strict=True):
            self._ledger.count(rank, nbytes)
        taken, given = (list(each) for each in counts)
        dist.all_to_all_single(received, sent, taken, given, group=self._group, async_op=True).wait()

    def barrier(self) -> None:
        """Block the stream until all ranks have finished their earlier work on it. Needs `peer_buffers`."""
        assert self._barrier_buffers is not None, "peer_buffers makes them"
        received, sent = self._barrier_buffers
        dist.all_to_all_single(received, sent, group=self._group, async_op=True).wait()

    def record_write(self, peer: int, nbytes: int) -> None:
        """Record in the ledger that this rank wrote `nbytes` to the buffer of group rank `peer`."""
        self._ledger.count(self.ranks[peer], nbytes)


def copy_beside(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> torch.cuda.Event:
    """Copy on `stream`, after all work submitted to the current stream so far; the event follows the copy."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


def copy(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
