"""Parameters that are held and gathered as 8-bit codes, one byte each (--fp8-param-gather).

The scales of the codes are the model's matter: `WeightEncoder` is what the engine needs of it. A unit with
such parameters lies in its slot as placement.py says. After each step every rank encodes its shard of the
master weights. Where weight differences cross nodes, it encodes its part of the reference when all messages
have been applied: the ranks that have the same part then write the same codes, and no codes cross nodes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor


class WeightEncoder(Protocol):
    """Encodes weights by scales that change once per step; see model/fp8/weights.py."""

    @property
    def names(self) -> Collection[str]:
        """The parameters that are held as codes."""

    def attach(self, name: str, codes: Tensor) -> None:
        """Let the model multiply `codes`, bytes in the shape of a weight."""

    def begin(self) -> None:
        """Forget the maxima so far. Called before all weights are encoded anew."""

    def start(self, parts: Iterable[tuple[str, Tensor]], over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Begin, and without scales of earlier steps scale each weight by itself.

        `parts` of weights, (n,) fp32, are those that this rank encodes; `over_ranks` returns the largest
        magnitudes over all ranks.
        """

    def encode(self, name: str, numbers: Tensor, codes: Tensor) -> None:
        """Write the codes of a part of a weight, (n,) fp32, to bytes (n,); its maximum grows."""


class ProductScaling(Protocol):
    """Scales of 8-bit products, equal on all ranks, which change once per step: model/fp8/scaling.py."""

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
