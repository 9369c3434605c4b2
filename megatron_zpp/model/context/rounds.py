"""Which chunks of keys and values a context rank of a ring gets when, and which of its queries see them.

C context ranks share samples of S tokens, of which each has two chunks (model/context/parts.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_zpp.model.context.parts import places

Pair = tuple[int, int]  # a chunk of queries of this rank, and one of keys of another rank: each 0 or 1


@dataclass(frozen=True)
class Block:
    """Chunks of queries that see chunks of keys, and where in a sample either begin."""

    queries: range
    keys: range
    query_start: int
    key_start: int

    @property
    def causal(self) -> bool:
        """Whether they are the same tokens; else all queries come after all keys."""
        return self.query_start == self.key_start


@dataclass(frozen=True)
class Round:
    """One exchange of keys and values, and which queries of this rank see them.

    Chunks `received` come from the rank `distance` places before this one, and chunks `sent` go to the rank
    as far behind it. `pairs` are those in which a query sees a key, under the causal mask and a window. The
    first two pairs of the first round are of the same tokens. Chunks begin at `query_starts` and `key_starts`
    of a sample.
    """

    distance: int
    pairs: tuple[Pair, ...]
    received: range
    sent: range
    query_starts: tuple[int, int]
    key_starts: tuple[int, int]

    def blocks(self, pairs: Sequence[Pair], *, joined: bool) -> Iterator[Block]:
        """The blocks of `pairs`: one for each, or `joined` to the one that they fill."""
        for group in [pairs] if joined and pairs else [[pair] for pair in pairs]:
            queries, keys = (_range(chunks) for chunks in zip(*group, strict=True))
            yield Block(queries, keys, self.query_starts[queries.start], self.key_starts[keys.start])


@cache
def rounds(ranks: int, rank: int, tokens: int, window: int | None) -> tuple[Round, ...]:
    """The rounds of `rank` for samples of `tokens`, the first of which has its own keys.

    All `ranks` omit the same rounds, those in which none of them needs a chunk.
    """
    starts = [
        (first.start, last.start) for first, last in (places(tokens, ranks, each) for each in range(ranks))
    ]
    chunk = tokens // (2 * ranks)

    def pairs(own: int, source: int) -> tuple[Pair, ...]:
        found = []
        for query, key in ((0, 0), (1, 1), (1, 0), (0, 1)):
            distance = starts[own][query] - starts[source][key]
            nearest = distance - chunk + 1 if distance else 0
            if distance >= 0 and (window is None or nearest < window):
                found.append((query, key))
        return tuple(found)

    found = []
    for distance in range(ranks):
        if any(pairs(own, (own - distance) % ranks) for own in range(ranks)):
            before, behind = (rank - distance) % ranks, (rank + distance) % ranks
            seen, wanted = pairs(rank, before), pairs(behind, rank)
            received, sent = (_range(key for _, key in each) for each in (seen, wanted))
            found.append(Round(distance, seen, received, sent, starts[rank], starts[before]))
    return tuple(found)


def _range(chunks: Iterable[int]) -> range:
    found = sorted(chunks)
    return range(found[0], found[-1] + 1) if found else range(0)
