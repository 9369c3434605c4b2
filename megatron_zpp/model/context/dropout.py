"""Dropout whose masks depend on the places of tokens, not on which rank has them."""

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed number


class PlacedDropout(nn.Dropout):
    """Dropout of the hidden states of one context rank's tokens, of samples of `tokens` tokens.

    With tensor ranks it has a part of these, `tensor_rank`. Each forward draws one number, which context
    ranks, whose generators have the same state, have alike; masks are hashes of it, of a token's place in the
    micro-batch and of the channel.
    """

    def __init__(self, p: float, tokens: int, ranks: int, rank: int, tensor_rank: int = 0) -> None:
        super().__init__(p)
        self._tokens, self._ranks, self._rank, self._tensor_rank = tokens, ranks, rank, tensor_rank

    def forward(self, input: Tensor) -> Tensor:
        """(B, S / C, D), or the rows of a tensor rank (R, D), as they are."""
        if not self.training or self.p == 0:
            return input
        seed = torch.randint(2**31 - 1, (1,), device=input.device)
        width = input.shape[-1]
        rows = _mix(self._places(input.numel() // width, input.device) * _GOLDEN + seed)
        columns = torch.arange(width, device=input.device)
        bits = _mix(rows[:, None] ^ columns) & 0xFFFFFF
        kept = (bits >= int(self.p * 2**24)).view(input.shape)
        return torch.where(kept, input * (1 / (1 - self.p)), 0.0)

    def _places(self, count: int, device: torch.device) -> Tensor:
        """The places of this rank's rows, of which there are so many, among all tokens of the micro-batch."""
        own, chunk = self._tokens // self._ranks, self._tokens // (2 * self._ranks)
        rows = torch.arange(count, device=device) + self._tensor_rank * count
        at = rows % own
        first, last = self._rank * chunk, (2 * self._ranks - 1 - self._rank) * chunk
        inside = torch.where(at < chunk, first + at, last - chunk + at)
        return rows // own * self._tokens + inside


def _mix(bits: Tensor) -> Tensor:
    """splitmix64's bijection of 64 bits, which are signed numbers here."""
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return bits ^ ((bits >> 31) & (2**33 - 1))
