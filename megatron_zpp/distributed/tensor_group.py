"""The tensor ranks of one group, and their collectives, which torch.compile takes into its graphs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed them and warns about the old names, the only ones in torch 2.8.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_COLLECTIVES = torch.ops._c10d_functional  # asynchronous: `wait_tensor` makes the current stream wait


def _high_priority(timeout: timedelta | None) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from the one given to new_group
    return options


class TensorGroup:
    """A communicator of the `ranks` of a job that share every layer."""

    def __init__(
        self, ranks: Sequence[int], rank: int, timeout: timedelta | None = None, *, prioritized: bool = False
    ) -> None:
        """Create the communicator. All of `ranks`, this rank `rank` among them, must do so.

        `prioritized`: NCCL's thread blocks get multiprocessors before the rest of a product that has begun.
        Otherwise a collective that starts beside a product waits until all blocks of the product have begun.
        """
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(rank)
        options = _high_priority(timeout) if prioritized and dist.get_backend() == "nccl" else None
        self._group = dist.new_group(
            self.ranks, timeout=timeout, pg_options=options, use_local_synchronization=True
        )
        self._name = self._group.group_name

    @classmethod
    def named(cls, name: str) -> "TensorGroup":
        """Return the group of this rank that has the `name`: operators of a graph are told of it so."""
        group = cls.__new__(cls)
        group._group, group._name = _resolve_process_group(name), name  # type: ignore[arg-type]
        group.ranks = tuple(dist.get_process_group_ranks(group._group))
        group.size, group.rank = group._group.size(), group._group.rank()
        return group

    @property
    def name(self) -> str:
        """What `named` takes."""
        return self._name

    def start_gather(self, rows: Tensor) -> Tensor:
        """Start an all-gather: (R, …) on each rank -> (ranks · R, …), for `wait`."""
        return _COLLECTIVES.all_gather_into_tensor(rows.contiguous(), self.size, self._name)

    def start_scatter_sum(self, rows: Tensor) -> Tensor:
        """Start a reduce-scatter: (ranks · R, …) -> this rank's R rows of the sum over ranks, for `wait`."""
        return _COLLECTIVES.reduce_scatter_tensor(rows.contiguous(), "sum", self.size, self._name)

    def wait(self, started: Tensor) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for a collective; returns its result."""
        return _COLLECTIVES.wait_tensor(started)

    def start_gather_into(self, out: Tensor, rows: Tensor) -> "dist.Work":
        """Start an all-gather of contiguous rows (R, …) on each rank into `out` (ranks · R, …).

        Both tensors must stay until the current stream has waited (`Work.wait`).
        """
        return _all_gather(out, rows, group=self._group, async_op=True)

    def start_scatter_sum_into(self, out: Tensor, rows: Tensor) -> "dist.Work":
        """Start a reduce-scatter of contiguous rows (ranks · R, …) into `out`: this rank's R of the sum.

        Both tensors must stay until the current stream has waited (`Work.wait`).
        """
        return _reduce_scatter(out, rows, group=self._group, async_op=True)

    def gather(self, rows: Tensor) -> Tensor:
        """(R, …) on each rank -> (ranks · R, …)."""
        return self.wait(self.start_gather(rows))

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """(ranks · R, …) -> this rank's R rows of the sum over ranks."""
        return self.wait(self.start_scatter_sum(rows))

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on all of them."""
        return self.wait(_COLLECTIVES.all_reduce(value.contiguous(), "sum", self._name))
