"""Dropout whose masks depend on the places of tokens, not on which rank has them."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.library import custom_op

Chunk = TypeVar("Chunk")

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
        self._drawn: tuple[Tensor, Tensor] | None = None  # for the chunk that is computed

    def forward(self, input: Tensor) -> Tensor:
        """(B, S / C, D), or the rows of a tensor rank (R, D), as they are; or a chunk of `in_chunks`."""
        if not self.training or self.p == 0:
            return input
        seed, first = self._drawn or self._draw(input)
        width = input.shape[-1]
        place = self._tokens, self._ranks, self._rank
        kept = _kept(seed, first, input.numel() // width, width, self.p, *place).view(input.shape)
        return torch.where(kept, input * (1 / (1 - self.p)), 0.0)

    def in_chunks(self, chunks: Iterable[Chunk], size: int, whole: Tensor) -> Iterator[Chunk]:
        """`chunks` of `size` rows of `whole`, whose masks are those that `whole` would have."""
        seed, first = self._draw(whole)
        try:
            for chunk in chunks:
                self._drawn = seed, first
                yield chunk
                first = first + size
        finally:
            self._drawn = None

    def _draw(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """A seed, and the place of the first row of `whole` among those of this context rank: (1) int64."""
        seed = torch.randint(2**31 - 1, (1,), device=whole.device)
        return seed, torch.full_like(seed, self._tensor_rank * (whole.numel() // whole.shape[-1]))


# An operator of its own: torch 2.13's compiler makes kernels of these products on CPUs that are wrong.
@custom_op("megatron_zpp_model::placed_mask", mutates_args=())
def _kept(
    seed: Tensor, first: Tensor, rows: int, width: int, p: float, tokens: int, ranks: int, rank: int
) -> Tensor:
    """(1) int64 -> which elements stay of so many `rows` of a context rank, from the `first` on: (R, D)."""
    own, chunk, last = tokens // ranks, tokens // (2 * ranks), 2 * ranks - 1 - rank
    at = first + torch.arange(rows, device=seed.device)
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
def _(seed: Tensor, first: Tensor, rows: int, width: int, *others: float) -> Tensor:
    return seed.new_empty(rows, width, dtype=torch.bool)


def _mix(bits: Tensor) -> Tensor:
    """splitmix64's bijection of 64 bits, which are signed numbers here."""
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return bits ^ ((bits >> 31) & (2**33 - 1))
