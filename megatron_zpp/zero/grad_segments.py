"""Parts of a whole gradient, each wherever it lies."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class GradSegment(NamedTuple):
    """The elements of a flat buffer from `start` on, here or elsewhere."""

    start: int
    flat: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of such a buffer."""
        return whole[self.start : self.start + len(self.flat)]


def segments_inside(parts: Iterable[GradSegment], owned: range) -> Iterator[GradSegment]:
    """What `parts` have of the `owned` elements, counted from the first of these."""
    for start, flat in parts:
        begin, end = max(start, owned.start), min(start + len(flat), owned.stop)
        if begin < end:
            yield GradSegment(begin - owned.start, flat[begin - start : end - start])


def join(parts: Sequence[GradSegment], room: Tensor) -> Tensor:
    """Copies all `parts` of a buffer to their places in `room`, in its format, and returns what they fill."""
    whole = room[: sum(len(part.flat) for part in parts)]
    for part in parts:
        if part.of(whole).data_ptr() != part.flat.data_ptr():  # else it is there already
            part.of(whole).copy_(part.flat)
    return whole
