"""Tensor or context ranks of one group, and their collectives, which torch.compile takes into its graphs."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed it and warns about the old name, the only one in torch 2.8.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_COLLECTIVES = torch.ops._c10d_functional  # asynchronous: `wait_tensor` makes the current stream wait


class TensorGroup:
    """A communicator of the `ranks` of a job that share every layer, or the tokens of every sample.

    `process_group` is that communicator, and `named` takes its `name`.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout: timedelta | None = None) -> None:
        """Create the communicator. All of `ranks`, this rank `rank` among them, must do so."""
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(rank)
        self.process_group = dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True)
        self.name = self.process_group.group_name

    @classmethod
    def named(cls, name: str) -> "TensorGroup":
        """Return the group of this rank that has the `name`: operators of a graph are told of it so."""
        group = cls.__new__(cls)
        group.process_group, group.name = _resolve_process_group(name), name  # type: ignore[arg-type]
        group.ranks = tuple(dist.get_process_group_ranks(group.process_group))
        group.size, group.rank = group.process_group.size(), group.process_group.rank()
        return group

    def start_gather(self, rows: Tensor) -> Tensor:
        """Start an all-gather: (R, …) on each rank -> (ranks · R, …), for `wait`."""
        # Two threads of a gloo group write its last operation's name without a lock (torch 2.8 to 2.13).
        # A name of over 15 letters is on the heap, which that corrupts: ALLGATHER_COALESCED. Graphs of
        # torch 2.11 refuse the form with `out`, which has a short name.
        if rows.is_cpu:
            sizes = [len(rows)] * self.size
            return _COLLECTIVES.all_to_all_single(torch.cat([rows] * self.size), sizes, sizes, self.name)
        return _COLLECTIVES.all_gather_into_tensor(rows.contiguous(), self.size, self.name)

    def start_scatter_sum(self, rows: Tensor) -> Tensor:
        """Start a reduce-scatter: (ranks · R, …) -> this rank's R rows of the sum over ranks, for `wait`."""
        return _COLLECTIVES.reduce_scatter_tensor(rows.contiguous(), "sum", self.size, self.name)

    def wait(self, started: Tensor) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for a collective; returns its result."""
        return _COLLECTIVES.wait_tensor(started)

    def gather_into(self, out: Tensor, rows: Tensor) -> None:
        """All-gather contiguous rows (R, …) of each rank into `out` (ranks · R, …)."""
        all_gather_single(out, rows, group=self.process_group)

    def exchange_parts(self, parts: Tensor) -> Tensor:
        """(ranks, …), a part for each rank -> what each rank has for this one."""
        sizes = [1] * self.size
        return self.wait(_COLLECTIVES.all_to_all_single(parts.contiguous(), sizes, sizes, self.name))

    def gather(self, rows: Tensor) -> Tensor:
        """(R, …) on each rank -> (ranks · R, …)."""
        return self.wait(self.start_gather(rows))

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """(ranks · R, …) -> this rank's R rows of the sum over ranks."""
        return self.wait(self.start_scatter_sum(rows))

    def start_sum(self, value: Tensor) -> Tensor:
        """Start an all-reduce, the sum over ranks with the same bits on all of them, for `wait`."""
        return _COLLECTIVES.all_reduce(value.contiguous(), "sum", self.name)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on all of them."""
        return self.wait(self.start_sum(value))
