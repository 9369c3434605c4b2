"""What all ranks must agree on in a step: sums over ranks of squares, zeros and the losses' weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.exchange.sums import sum_over_ranks
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.reads import order_after
from megatron_zpp.zero.sections import GRADIENT_NORM, WAIT_REDUCTIONS, Sections
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.weights import Weights

LEAST_WEIGHT = 1e-9  # of a step's losses: less than one token of any batch


def divisor_of(scale: Tensor, summed: int, weight: Tensor | None) -> Tensor:
    """What divides a sum of gradients of losses times `scale`, so that it is their mean.

    The sum is of `summed` gradients, or by `weight`. Without a token that counts, all gradients are zero.
    """
    return scale * (summed if weight is None else weight.clamp(min=LEAST_WEIGHT).float())


def shrink_of(norm: Tensor, clip_grad: float) -> Tensor:
    """What divides a gradient of this `norm` () to clip it; a `clip_grad` of 0 does not clip."""
    if clip_grad > 0:
        return torch.clamp((norm + 1e-6) / clip_grad, min=1.0)
    return torch.ones_like(norm)


class StepSums:
    """Sums over the ranks of `mesh`: each counts its shard, and one of them what tensor ranks share."""

    def __init__(
        self, units: Sequence[Unit], gradients: Gradients, weights: Weights, mesh: Mesh, sections: Sections
    ) -> None:
        self._units, self._gradients, self._sections = list(units), gradients, sections
        self._mesh, self._weights = mesh, weights
        self.in_order: Tensor | None = None  # (); whether ranks have sent the same in the newest step

    def of_gradients(self, weight: float | None) -> tuple[Tensor, Tensor | None]:
        """The norm () fp64 of the summed gradient, and the sum () of weights: one all-reduce.

        `weight` is that of this rank's losses, None without weights. Squares are summed in fp32 in blocks
        that no shard boundary divides, then in fp64, whose rounding does not reach the result. So the
        clipping factor has the same bits however the gradient is sharded. What the newest exchange of weight
        differences missed is added up with them. The norm is NaN, which skips the step, if ranks have sent
        gradients or weights of units in different orders, because those of different units were then mixed,
        or if their micro-batches differ in number or some have no weights, so that ranks would divide by
        other numbers.
        """
        formats = self._weights.formats
        squares = []
        for units in (self._units[1:], self._units[:1]):  # the first unit's gradient is summed last
            with self._sections(WAIT_REDUCTIONS):
                self._gradients.wait(units)
            with self._sections(GRADIENT_NORM):
                squares += [self._gradients.squares_of(unit) for unit in units]
        with self._sections(GRADIENT_NORM):
            sums = [torch.cat(squares).sum(dtype=torch.float64).view(1)]
            order = order_after(self._gradients.order, self._weights.order)
            order = order_after(order, weight is not None)
            once = (weight or 0.0) if self._mesh.tensor_rank == 0 else 0.0  # for all tensor ranks
            sums += [torch.full_like(sums[0], float(number)) for number in (order, order * order, once)]
            measured = [] if formats is None else [formats.measured.flatten()]
            total = sum_over_ranks(torch.cat((*sums, *measured)), self._mesh)
            if formats is not None:
                formats.decide(total[len(sums) :].view(-1, 2))
        # For numbers that differ n times the sum of squares is more than the square of the sum.
        self.in_order = total[2] * self._mesh.world_size == total[1].square()
        norm = torch.where(self.in_order, total[0].sqrt(), torch.nan)
        return norm, None if weight is None else total[3]

    @torch.no_grad()
    def norm_of_weights(self) -> Tensor:
        """The norm () fp64 of the master weights of all units; every rank must call it."""
        norms = torch.stack([torch.linalg.vector_norm(self._counted(unit)) for unit in self._units])
        total = norms.double().square().sum().to(self._units[0].full.device)
        return sum_over_ranks(total, self._mesh).sqrt()

    def _counted(self, unit: Unit) -> Tensor:
        """This rank's shard of the master weights, without those that another tensor rank counts."""
        elsewhere, shard = self._gradients.counted_elsewhere[unit], unit.weights.part(unit.shard).decoded()
        counted = shard.clone() if elsewhere else shard
        for blocks in elsewhere:
            counted.view(-1, SQUARES_BLOCK)[blocks.start : blocks.stop].zero_()
        return counted
