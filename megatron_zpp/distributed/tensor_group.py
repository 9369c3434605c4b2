"""The tensor ranks of one group, and their collectives, which torch.compile takes into its graphs."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_COLLECTIVES = torch.ops._c10d_functional  # asynchronous: `wait_tensor` makes the current stream wait


class TensorGroup:
    """A communicator of the `ranks` of a job that share every layer."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout: timedelta | None = None) -> None:
        """Create the communicator. All of `ranks`, this rank `rank` among them, must do so."""
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(rank)
        self._group = dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True)
        self._name = self._group.group_name

    def start_gather(self, rows: Tensor) -> Tensor:
        """Start an all-gather: (R, …) on each rank -> (ranks · R, …), for `wait`."""
        return _COLLECTIVES.all_gather_into_tensor(rows.contiguous(), self.size, self._name)

    def start_scatter_sum(self, rows: Tensor) -> Tensor:
        """Start a reduce-scatter: (ranks · R, …) -> this rank's R rows of the sum over ranks, for `wait`."""
        return _COLLECTIVES.reduce_scatter_tensor(rows.contiguous(), "sum", self.size, self._name)

    def wait(self, started: Tensor) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for a collective; returns its result."""
        return _COLLECTIVES.wait_tensor(started)

    def gather(self, rows: Tensor) -> Tensor:
        """(R, …) on each rank -> (ranks · R, …)."""
        return self.wait(self.start_gather(rows))

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """(ranks · R, …) -> this rank's R rows of the sum over ranks."""
        return self.wait(self.start_scatter_sum(rows))

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on all of them."""
        return self.wait(_COLLECTIVES.all_reduce(value.contiguous(), "sum", self._name))
