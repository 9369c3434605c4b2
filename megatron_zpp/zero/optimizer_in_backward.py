"""Steps each unit as soon as the backward has made its gradient (--optimizer-in-backward)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.config.options import option_error
from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.optimizer import DeviceOptimizer, Rates
from megatron_zpp.zero.prefetch import Prefetcher
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.step_sums import divisor_of, shrink_of


class StepInBackward:
    """A step of one micro-batch on one rank, which consumes and frees gradients unit by unit.

    The norm of the gradient is not known when the first units change. A unit is clipped by the norm of the
    last step, or by that of this step's gradients so far if that is larger, which bounds what a spike adds to
    the moments. A loss that is not finite skips the step. From a gradient that is not finite on, no unit
    changes; those before it have changed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: DeviceOptimizer,
        gradients: Gradients,
        prefetcher: Prefetcher,
        clip_grad: float,
    ) -> None:
        self._optimizer, self._gradients, self._prefetcher = optimizer, gradients, prefetcher
        self._clip_grad = clip_grad
        self._numbers = {unit: number for number, unit in enumerate(units)}  # as the optimizer has them
        device = units[0].full.device
        self.rates: Rates | None = None  # of the next backward
        self._rates: Rates | None = None  # of the newest one, until `end`
        self.last_norm = torch.zeros((), device=device)  # the newest one that was finite
        self._one = torch.ones((), device=device)
        self._weight: Tensor | None = None
        self._divisor, self._norm, self._squares = self._one, self._one, self._one.double()
        gradients.consume = self._step

    def begin(self, loss: Tensor, weight: float | None) -> None:
        """Prepare for the backward of a `loss` () of this `weight`. Raises ValueError without rates."""
        if self.rates is None:
            raise ValueError("with --optimizer-in-backward call begin_step before each accumulate")
        self._rates, self.rates = self.rates, None
        self._weight = None if weight is None else torch.full_like(self._squares, weight)
        self._divisor = divisor_of(self._one, 1, self._weight)
        self._squares = torch.zeros_like(self._squares)
        self._optimizer.begin_step(self._rates, self._divisor, 1.0 - torch.isfinite(loss).float())

    def finish_backward(self) -> None:
        """Allow reads of the new weights."""
        self._prefetcher.stepped = set()
        if self._prefetcher.always_gathered:
            for unit in self._numbers:
                unit.guard.set_readable(True)

    def end(self, rates: Rates) -> tuple[Tensor, Tensor | None]:
        """The norm of the whole gradient () fp32 and the weight () of the loss, if it has one.

        Raises ValueError if `rates` are not those of a backward since the last call.
        """
        if rates != self._rates:
            fix = f"the backward has stepped at {self._rates}; give step what begin_step got"
            raise option_error("learning_rate", rates, fix)
        self._rates = None
        self.last_norm.copy_(torch.where(torch.isfinite(self._norm), self._norm, self.last_norm))
        return self._norm, self._weight

    def _step(self, unit: Unit) -> None:
        """Change a unit whose gradient is whole, and free the gradient."""
        assert self._rates is not None
        unit.grad.wait()
        self._squares = self._squares + self._gradients.squares_of(unit).sum(dtype=torch.float64)
        self._norm = (self._squares.sqrt() / self._divisor).float()
        found_inf = 1.0 - torch.isfinite(self._norm).float()
        shrink = shrink_of(torch.maximum(self._norm, self.last_norm), self._clip_grad)
        self._optimizer.compute_scalars(self._rates, self._divisor * shrink, found_inf)
        self._optimizer.update(self._numbers[unit])
        self._prefetcher.changed(unit.number)  # and gathered at stage 3 when the forward needs it
        self._prefetcher.stepped.add(unit.number)
        if self._prefetcher.always_gathered:
            unit.guard.set_readable(False)  # a backward that has yet to read old weights is an error
        unit.grad.release()
