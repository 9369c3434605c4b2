"""Gathers and reductions of flat buffers, each on a lane of its own beside the compute.

A lane is a communicator and, on a GPU, a stream: what is submitted to it runs in order, after the compute
submitted so far and while the compute submitted later runs. On a CPU gloo's threads do the same.
"""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.zero.copy_engines import SymmetricMemory, copy_engines_reach
from megatron_zpp.zero.topology import Topology
from megatron_zpp.zero.traffic import TrafficLedger

# torch 2.13 gave them new names and warns of the old ones, which are all that 2.8 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A submitted collective. It owns its buffers until `wait` has returned."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        """Lets the present stream (on a CPU the caller) wait for the result; again is harmless."""
        if self._wait is not None:
            self._wait()
            self._wait = None


class Lane:
    """Runs collectives in order beside the compute. Every rank must submit the same ones."""

    def __init__(
        self, topology: Topology, device: torch.device, ledger: TrafficLedger, timeout: timedelta | None
    ) -> None:
        """`timeout` is when a collective that does not end becomes an error; None: torch's default."""
        self._ranks, self._device, self._ledger = topology.world_size, device, ledger
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._symmetric = SymmetricMemory(device, timeout) if copy_engines_reach(topology, device) else None
        if self._symmetric is not None:
            self._group = self._symmetric.group
        else:
            self._group = dist.new_group(timeout=timeout) if self._ranks > 1 else None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that this lane sends or fills, where it moves it best. Every rank must make the same."""
        with nullcontext() if self._symmetric is None else self._symmetric.allocating():
            return torch.zeros(numel, dtype=dtype, device=self._device)

    def ready(self) -> None:
        """After the last `zeros` and before the first collective."""
        if self._symmetric is not None:
            self._symmetric.register()

    def close(self) -> None:
        """After the last collective, before the buffers are freed."""
        if self._symmetric is not None:
            self._symmetric.close()

    def all_gather(self, full: Tensor, shard: Tensor) -> Pending:
        """Fills `full` (ranks · n,) with every rank's `shard` (n,), which may be its own part of `full`."""
        if self._ranks == 1:
            return self._submit(None, lambda: _copy(full, shard))
        self._ledger.around_the_ring((self._ranks - 1) * shard.nbytes)
        return self._submit(lambda: _all_gather(full, shard, group=self._group, async_op=True), None)

    def reduce_scatter(self, full: Tensor, shard: Tensor, *, add: bool, scratch: Tensor) -> Pending:
        """Sums `full` (ranks · n,) over ranks into the fp32 `shard` (n,): overwrites it, or adds to it.

        An all-to-all into `scratch`, like `full`, then a sum in fp32 in the order of the ranks. Its volume is
        that of a reduce-scatter, 16-bit numbers stay 16 bits on the wire without a rounding in the sum, whose
        bits are those of one process that accumulates the ranks' batches in turn. One rank: no `scratch`.
        """
        if self._ranks == 1:
            return self._submit(None, lambda: _put(shard, full, add))
        self._ledger.to_every_peer(full.nbytes // self._ranks)

        def add_up() -> None:
            for index, part in enumerate(scratch.chunk(self._ranks)):
                _put(shard, part, add or index > 0)

        return self._submit(
            lambda: dist.all_to_all_single(scratch, full, group=self._group, async_op=True), add_up
        )

    def all_reduce(self, full: Tensor, total: Tensor) -> Pending:
        """Sums `full` (ranks · n,) over ranks in its own format, then into `total`, which may be `full`."""
        if self._ranks == 1:
            return self._submit(None, lambda: _copy(total, full))
        self._ledger.around_the_ring(2 * (self._ranks - 1) * full.nbytes // self._ranks)
        return self._submit(
            lambda: dist.all_reduce(full, group=self._group, async_op=True), lambda: _copy(total, full)
        )

    def _submit(self, start: Callable[[], dist.Work] | None, finish: Callable[[], None] | None) -> Pending:
        """Starts a collective now and runs `finish` behind it."""
        if self._stream is None:
            work = start() if start else None

            def wait() -> None:
                if work is not None:
                    work.wait()
                if finish is not None:
                    finish()

            return Pending(wait)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if start is not None:
                start().wait()  # the lane's stream waits for NCCL's; the host does not
            if finish is not None:
                finish()
            done = self._stream.record_event()
        return Pending(lambda: torch.cuda.current_stream().wait_event(done))


def gather_now(shard: Tensor, topology: Topology) -> Tensor:
    """Every rank's `shard` (n,) in a new buffer (ranks · n,); outside of steps, and not in the ledger."""
    full = shard.new_empty(topology.world_size * len(shard))
    if topology.world_size == 1:
        return full.copy_(shard)
    _all_gather(full, shard)
    return full


def sum_over_ranks(value: Tensor, topology: Topology) -> Tensor:
    """The sum of one small tensor over all ranks; a NaN on one rank is a NaN on all."""
    if topology.world_size > 1:
        value = value.clone()
        dist.all_reduce(value)  # SUM: gloo's MAX and MIN would lose a NaN
    return value


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _put(target: Tensor, source: Tensor, add: bool) -> None:
    target.add_(source) if add else _copy(target, source)
