"""A sample of bounded size of a stream of text, the same for the same stream."""

import heapq
import random
from collections.abc import Iterable, Iterator

_CHUNK = 16 << 10  # characters
_SEED = 1234


def sample_text(texts: Iterable[str], max_bytes: int) -> list[str]:
    """Chunks of whole lines from all over the stream, in its order, of at most `max_bytes` of UTF-8.

    Every chunk is equally likely to stay, and when all fit, all do. Memory holds the sample alone.
    """
    rng = random.Random(_SEED)
    kept: list[tuple[float, int, int, str]] = []  # a heap: the chunk with the lowest draw goes first
    held = 0
    for order, chunk in enumerate(chunk for text in texts for chunk in _chunks(text)):
        size = len(chunk.encode())
        heapq.heappush(kept, (rng.random(), order, size, chunk))
        held += size
        while held > max_bytes:
            held -= heapq.heappop(kept)[2]
    return [chunk for _, _, _, chunk in sorted(kept, key=lambda entry: entry[1])]


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + _CHUNK
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
