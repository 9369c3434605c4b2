"""Draws a sample of bounded size from a stream of text; the same stream gives the same sample."""

import heapq
import random
from collections.abc import Iterable, Iterator

_CHUNK = 16 << 10  # characters
_SEED = 1234


def sample_text(texts: Iterable[str], max_bytes: int) -> list[str]:
    """Return chunks of whole lines from all over the stream, in order, of at most `max_bytes` of UTF-8.

    Every chunk is equally likely to be in the sample; all chunks are, if they fit. Memory holds only the
    sample.
    """
    rng = random.Random(_SEED)
    kept: list[tuple[float, int, int, str]] = []  # a heap: the chunk with the lowest draw is removed first
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
