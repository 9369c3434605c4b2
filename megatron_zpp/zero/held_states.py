"""One kind of states of a unit as a rank holds them: in fp32, or in a form of ops/state_codes.py."""

from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS, SECOND_MOMENT = "weights", "exp_avg_sq"  # as checkpoints name them
MOMENTUM = "momentum_buffer"  # of the matrices that Muon trains, as torch calls it
OUTER = "outer_"  # begins the names of what an island keeps beside: islands/outer_state.py
OUTER_WEIGHTS, OUTER_SENT = OUTER + WEIGHTS, OUTER + "sent_weights"


class HeldStates(NamedTuple):
    """Master weights, moments or another of the kinds that checkpoints name."""

    kind: str
    values: Tensor
    beside: Tensor | None = None  # a byte for each block of numbers, or for each bf16 weight

    @property
    def is_plain(self) -> bool:
        """Whether they are fp32."""
        return self.values.dtype == torch.float32

    def part(self, elements: slice) -> "HeldStates":
        """Some elements, whole blocks if these have scales."""
        values, beside = self.values[elements], self.beside
        if beside is not None:
            block = max(1, len(self.values) // max(1, len(beside)))
            beside = beside[elements.start // block : -(-elements.stop // block)]
        return HeldStates(self.kind, values, beside)

    def decoded(self) -> Tensor:
        """The numbers in fp32: these themselves, or a copy."""
        if self.is_plain:
            return self.values
        from megatron_zpp.ops.reference import tiles
        from megatron_zpp.ops.state_codes import decode, joined_weights

        decoded = torch.empty(len(self.values), device=self.values.device)
        for here in tiles(len(decoded)):
            _, values, beside = self.part(here)
            if self.kind == WEIGHTS:
                assert beside is not None
                decoded[here] = joined_weights(values, beside)
            else:
                decoded[here] = decode(values, beside, second=self.kind == SECOND_MOMENT)
        return decoded

    def replace(self, numbers: Tensor) -> None:
        """Replace them by fp32 numbers, rounded to the nearest of the form."""
        from megatron_zpp.ops.reference import tiles
        from megatron_zpp.ops.state_codes import FORMS, encode, split_weights

        for here in tiles(len(numbers)):
            _, values, beside = self.part(here)
            form, second = FORMS[values.dtype], self.kind == SECOND_MOMENT
            of_weights = self.kind == WEIGHTS
            coded = split_weights(numbers[here]) if of_weights else encode(numbers[here], form, second=second)
            values.copy_(coded[0])
            if beside is not None:
                assert coded[1] is not None
                beside.copy_(coded[1])
