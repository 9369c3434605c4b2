"""Dropout whose masks depend on the places of tokens, not on which rank has them."""

import torch
from torch import Tensor, nn
from torch.library import custom_op

_ELEMENTS = 2**22  # elements of a mask that are made at a time, in 64 bits each


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
        rows = input.numel() // width
        place = self._tokens, self._ranks, self._rank, self._tensor_rank * rows
        kept = _kept(seed, rows, width, self.p, *place).view(input.shape)
        return torch.where(kept, input * (1 / (1 - self.p)), 0.0)


# An operator of its own: torch 2.13's compiler makes kernels of these products on CPUs that are wrong.
@custom_op("megatron_zpp_model::placed_mask", mutates_args=())
def _kept(
    seed: Tensor, rows: int, width: int, p: float, tokens: int, ranks: int, rank: int, first: int
) -> Tensor:
    """(1) int64 -> which elements stay of so many `rows` of a context rank, from the `first` on: (R, D)."""
    own, chunk, last = tokens // ranks, tokens // (2 * ranks), 2 * ranks - 1 - rank
    at = torch.arange(first, first + rows, device=seed.device)
    inside = at % own
    inside += torch.where(inside < chunk, rank * chunk, (last - 1) * chunk)
    keys = _mix((at // own * tokens + inside) ^ _mix(seed))
    columns = torch.arange(width, device=seed.device)
    kept = torch.empty(rows, width, dtype=torch.bool, device=seed.device)
    each = max(1, _ELEMENTS // width)
    for part, key in zip(kept.split(each), keys.split(each), strict=True):
        torch.ge(_mix(key[:, None] ^ columns) & 0xFFFFFF, int(p * 2**24), out=part)
    return kept


@_kept.register_fake
def _(seed: Tensor, rows: int, width: int, *others: float) -> Tensor:
    return seed.new_empty(rows, width, dtype=torch.bool)


def _mix(bits: Tensor) -> Tensor:
    """splitmix64's bijection of 64 bits, which are signed numbers here."""
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return bits ^ ((bits >> 31) & (2**33 - 1))
