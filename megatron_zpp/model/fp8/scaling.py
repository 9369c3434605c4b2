"""The scales of delayed scaling for all linear maps of a run, as a state that is updated once per step.

As Transformer Engine's DelayedScaling without a margin:

    scale = largest code / largest magnitude

The largest magnitude is that of the newest step or of all steps in the history. Without one that is larger
than 0 a scale stays as it is. A step is one optimizer step here, with all of its micro-batches, over all
ranks of the job, so that the state is the same on all of them.
"""

import base64
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatron_zpp.model.fp8.cast import LARGEST, SMALLEST, factors_of
from megatron_zpp.model.fp8.delayed import DelayedProduct

OUTPUT = "head"  # the output layer, whose products a resumed run may compute in other formats than before


class HeldWeight(NamedTuple):
    """A linear map whose weight is held as codes."""

    product: DelayedProduct
    factors: Tensor  # (2, 3, 4) fp32
    maxima: Tensor  # (3,) fp32: see model/fp8/cast.py


class DelayedScaling:
    """Histories and scales of the products of `model`, whose buffers it makes on `device`.

    L linear maps, H steps; the state is (H, L, 3) and (L, 3) fp32. Nothing waits for the device except
    `state`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        history: int = 1,
        algorithm: Literal["most_recent", "max"] = "most_recent",
    ) -> None:
        self._products = {
            name.removesuffix(".product"): module
            for name, module in model.named_modules()
            if isinstance(module, DelayedProduct)
        }
        count = len(self._products)
        self._algorithm, self._device = algorithm, device
        for product in self._products.values():
            product.maxima = torch.zeros(3, device=device)
        self._codes = torch.tensor(LARGEST, device=device)
        self._history = torch.zeros(history, count, 3, device=device)  # the newest step first
        self._scales = torch.ones(count, 3, device=device)
        self.known = False  # whether there are scales of earlier steps; without, each tensor scales itself
        self._handed_out = False  # whether all products have the factors that are known
        # Of each product, in memory of its own. The products have them once they are known.
        self._factors = [torch.empty(2, 3, 4, device=device) for _ in self._products]
        self._of_codes: Tensor | None = None  # (L, 3): maxima of weights that are held as codes

    def begin_step(self) -> None:
        """Forget the maxima of evaluations. Called before the first micro-batch of a step."""
        torch._foreach_zero_([product.maxima for product in self._products.values()])

    def maxima(self) -> Tensor:
        """The largest finite magnitudes of the step so far, on this rank: (L, 3) fp32.

        Those of weights that are held as codes are of the parts that this rank encoded.
        """
        maxima = torch.stack([product.maxima for product in self._products.values()])
        return maxima if self._of_codes is None else torch.maximum(maxima, self._of_codes)

    def hold_codes(self) -> dict[str, HeldWeight]:
        """Prepare products for weights that are held as codes; what these need, by linear map."""
        self._of_codes = torch.zeros_like(self._scales)
        held = {}
        for (name, product), factors, maxima in zip(
            self._products.items(), self._factors, self._of_codes, strict=True
        ):
            if product.holds_codes:
                product.code_factors = factors
                held[name] = HeldWeight(product, factors, maxima)
        return held

    def end_step(self, maxima: Tensor, found_inf: Tensor) -> None:
        """Set the scales of the next step from the `maxima` (L, 3) of all ranks.

        Those of a step that is skipped (`found_inf` is 1) are forgotten, unless there are no others.
        """
        forgotten = (found_inf > 0) & (self._history.amax(0) > 0)
        grown = torch.cat((maxima[None], self._history[:-1]))
        self._history = torch.where(forgotten, self._history, grown)
        largest = self._history[0] if self._algorithm == "most_recent" else self._history.amax(0)
        scales = self._codes / largest.clamp(min=SMALLEST)
        self._scales = torch.where(largest > 0, scales, self._scales)
        self._hand_out()

    def state(self) -> dict[str, Any] | None:
        """Return histories (fp32 in base64, the newest step first) and scales as JSON.

        None before the first step. Waits for the device.
        """
        if not self.known:
            return None
        histories, scales = self._history.cpu().transpose(0, 1), self._scales.tolist()
        entries = zip(self._products.items(), scales, histories.contiguous(), strict=True)
        return {
            name: _entry(numbers, history)
            for (name, product), numbers, history in entries
            if product.factors is not None  # an output layer that was added has none before its first step
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` returned; None: a run's start. A shorter history keeps the newest steps.

        Without an entry for the output layer, its tensors are scaled by themselves in the next step; an entry
        that is not needed is dropped. Raises ValueError if the state is that of other linear maps.
        """
        self.known = self._handed_out = False
        self._history.zero_()
        self._scales.fill_(1.0)
        for product in self._products.values():
            product.factors = None
        if state is None:
            return
        others = (state.keys() ^ self._products.keys()) - {OUTPUT}
        if others:
            raise ValueError(f"the scales of 8-bit products are those of another model: {min(others)}")
        begins = OUTPUT in self._products and OUTPUT not in state
        if begins:
            steps = len(_history_of(next(iter(state.values()))))
            state = {**state, OUTPUT: _entry([1.0] * 3, torch.zeros(steps, 3))}
        entries = [state[name] for name in self._products]
        saved = torch.stack([_history_of(entry) for entry in entries], 1)  # (H, L, 3)
        kept = min(len(saved), len(self._history))
        self._history[:kept] = saved[:kept].to(self._device)
        self._scales.copy_(torch.tensor([entry["scales"] for entry in entries]))
        self._hand_out()
        if begins:
            self._products[OUTPUT].factors, self._handed_out = None, False

    def _hand_out(self) -> None:
        if not self._handed_out:
            for product, own in zip(self._products.values(), self._factors, strict=True):
                product.factors = own
            self.known = self._handed_out = True
        torch._foreach_copy_(self._factors, list(factors_of(self._scales).unbind()))  # of (L, 2, 3, 4)


def _entry(scales: list[float], history: Tensor) -> dict[str, Any]:
    """The state of one linear map as JSON: three scales and (H, 3) fp32 on the CPU."""
    return {"scales": scales, "history": base64.b64encode(history.numpy().tobytes()).decode()}


def _history_of(entry: Mapping[str, Any]) -> Tensor:
    """The history (H, 3) of one linear map. Raises ValueError if it is none."""
    numbers = base64.b64decode(entry["history"], validate=True)
    if not numbers or len(numbers) % 12:
        raise ValueError(f"{len(numbers)} bytes are no history of three fp32 numbers per step")
    return torch.frombuffer(bytearray(numbers), dtype=torch.float32).view(-1, 3)
