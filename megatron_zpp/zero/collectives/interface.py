"""What every collective of weights and gradients does, plain or quantised."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.grad_segments import GradSegment


class Gather(Protocol):
    """Writes this rank's part of a unit as it is sent, and makes the whole unit from the parts of a group."""

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """Write master weights (n,) fp32 in the form in which they are sent."""

    def gather(
        self,
        full: Tensor,
        gather_source: Tensor,
        keep: Tensor | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Fill `full` (ranks · n,) from every rank's `gather_source`: the same bits on every rank.

        `keep`, a secondary shard, gets this rank's part of what was filled. The gather starts `after` the
        work that fills `gather_source`, where that is on another communication stream.
        """


class Target(NamedTuple):
    """What a reduction writes.

    `total` is fp32: this rank's shard (n,), or the whole (ranks · n,) for the algorithms of stage 0, which do
    not add. `squares` (len(total) / SQUARES_BLOCK,) get what `sum_squares` finds in `total` afterwards; given
    only if the plan `returns_squared_norms`. `rotation` is that of the unit in this step; given only if the
    plan `rotates`.
    """

    total: Tensor
    add: bool = False  # to what is there; else it is overwritten
    squares: Tensor | None = None
    rotation: Rotation | None = None


class Reduction(Protocol):
    """Sums the gradients of a unit over all ranks."""

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """Sum `sent`, together (ranks · n,), over ranks.

        At stage 0 `sent` may be the target. Gradients stay where they are until the sum is waited for.
        """


class GroupReduction(Protocol):
    """A reduction whose first hop and other hops run apart, for gradients that accumulate in groups."""

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """The first hop alone: sum `sent` over the group; overwrite the fp32 `accumulated`, or `add` to it.

        `accumulated` (plan.accumulator_numel,) has the order of elements that suits the other hops.
        """

    def reduce_accumulated(self, accumulated: Tensor, target: Target) -> Pending:
        """The other hops: sum what the groups accumulated, which is scratch memory afterwards."""


AnyReduction: TypeAlias = Reduction | GroupReduction
