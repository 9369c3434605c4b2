"""What the engine needs of the scales of 8-bit products: the same on all ranks, changed once per step."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class ProductScaling(Protocol):
    """A state of the run beside the weights; see model/fp8/scaling.py."""

    def begin_step(self) -> None:
        """Called before the first micro-batch of a step."""

    def maxima(self) -> Tensor:
        """The largest finite magnitudes of this rank's tensors in a step."""

    def end_step(self, maxima: Tensor, found_inf: Tensor) -> None:
        """Set the scales of the next step; `maxima` are those of all ranks, `found_inf` skips the step.

        They take an all-reduce beside that of the gradients' norm: no operation sums some numbers and takes
        maxima of others, and the hops of an all-gather would grow with the ranks
        (docs/internals/performance.md).
        """

    def state(self) -> dict[str, Any] | None:
        """The state as JSON; None before the first step."""

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state`."""
