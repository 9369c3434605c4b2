"""What the engine does for a model that tensor ranks share: cut parameters, sum and count replicated ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import TrafficLedger
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.placement import Layout, Placement, Split, within


@dataclass(frozen=True)
class TensorShare:
    """This rank's share of a model among `group`. Parameters that `splits` does not cut there are replicated.

    `splits` may also cut parameters among data ranks, see `layouts_of`. `exchanges` are those of
    `ExchangeCounter`, in forward order of units.

    Replicated parameters have the same bits on all ranks of the group: their gradients, of which each rank
    has the part of its own tokens or heads, are summed over the group before anything else happens to them.
    """

    group: TensorGroup | None = None
    splits: Mapping[str, Split] = field(default_factory=dict)
    exchanges: Sequence[tuple[int, int]] = ()

    @property
    def block(self) -> int:
        """Elements to which parameters are aligned, so that no block of squares has both kinds; 1: any."""
        return 1 if self.group is None else SQUARES_BLOCK

    def replicated(self, layout: Layout) -> tuple[int, ...]:
        """Which parameters of a unit all ranks of the group have whole; none without a group."""
        if self.group is None:
            return ()
        return tuple(index for index, each in enumerate(layout.placements) if self._replicates(each))

    def counted_elsewhere(self, layout: Layout, owned: range) -> list[range]:
        """The blocks of squares of the `owned` elements that another rank of the group counts."""
        if self.group is None or self.group.rank == 0:
            return []
        found: list[range] = []
        for piece in layout.pieces_in(owned):
            if self._replicates(piece.placement):
                at = within(piece.at, owned)
                start, stop = at.start // SQUARES_BLOCK, -(-at.stop // SQUARES_BLOCK)
                found.append(range(found.pop().start if found and found[-1].stop == start else start, stop))
        return found

    def _replicates(self, placement: Placement) -> bool:
        """Whether all ranks of the group, which are next to each other, have the same of a parameter."""
        assert self.group is not None
        return placement.split is None or placement.split.axis.stride >= self.group.size


def start_replicated_sum(group: TensorGroup, parts: list[Tensor]) -> Callable[[list[Tensor]], None]:
    """Start to sum the replicated gradients `parts` of a unit over tensor ranks, in fp32.

    Returns what lets the current stream wait for the sums, and writes them to places of the same shapes,
    rounded to the gradients' format.
    """
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    joined = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=parts[0].device)
    torch._foreach_copy_(_views(joined, parts), parts)
    started = group.start_sum(joined)

    def finish(places: list[Tensor]) -> None:
        torch._foreach_copy_(places, _views(group.wait(started), places))

    return finish


def _views(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a buffer (n,) with the shapes of `parts`, one behind the other."""
    flat = joined.split([part.numel() for part in parts])
    return [view.view(part.shape) for view, part in zip(flat, parts, strict=True)]


ALONE = TensorShare()


class ExchangeCounter:
    """Counts in `ledger` the bytes of the exchanges of activations, when passes reach their units.

    `exchanges` has, for each unit, the elements that its forward and its backward send per token of this
    rank: context and tensor ranks divide the tokens of a micro-batch among them. A compiled layer runs its
    collectives without Python, so that they cannot be counted where they are sent. The few numbers per token
    of the loss, and of norms across heads, are not counted.
    """

    def __init__(
        self, exchanges: Sequence[tuple[int, int]], ledger: TrafficLedger, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self.per_token, self._ledger, self._dtype = exchanges, ledger, dtype
        self._ranks = mesh.context_ranks * mesh.tensor_ranks
        self._bytes = 0  # of one element per token of this rank

    def begin(self, tokens: int) -> None:
        """Begin a pass over a micro-batch of `tokens`."""
        self._bytes = tokens // self._ranks * self._dtype.itemsize

    def count(self, index: int, *, backward: bool) -> None:
        """Count the backward of unit `index`, or its forward, or the repetition of that."""
        if self.per_token:
            self._ledger.intra_node += self.per_token[index][backward] * self._bytes
