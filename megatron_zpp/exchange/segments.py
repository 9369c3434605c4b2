"""Parts of a whole gradient, each wherever it lies."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.placement import SHARD_MULTIPLE, Layout


class GradSegment(NamedTuple):
    """The elements of a flat buffer from `start` on, in that buffer or elsewhere."""

    start: int
    flat: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of such a buffer."""
        return whole[self.start : self.start + len(self.flat)]


def segments_inside(parts: Iterable[GradSegment], owned: range) -> Iterator[GradSegment]:
    """The segments of the `owned` elements; their starts count from the first of these."""
    for start, flat in parts:
        begin, end = max(start, owned.start), min(start + len(flat), owned.stop)
        if begin < end:
            yield GradSegment(begin - owned.start, flat[begin - start : end - start])


def join(parts: Sequence[GradSegment], room: Tensor) -> Tensor:
    """Copy all segments to their places in `room`, in its dtype, and return the part that they fill."""
    whole = room[: sum(len(part.flat) for part in parts)]
    for part in parts:
        if part.of(whole).data_ptr() != part.flat.data_ptr():  # else it is there already
            part.of(whole).copy_(part.flat)
    return whole


def segments_of(layout: Layout, produced: list[Tensor], large: int) -> tuple[GradSegment, ...]:
    """The whole gradient of a unit, gaps included, from those of its parameters.

    A gradient of `large` elements or more is a segment itself. Others are copied, neighbours into one
    segment, since every segment costs kernel launches. Segments begin and end where blocks of SHARD_MULTIPLE
    do.
    """
    segments: list[GradSegment] = []
    copied: list[int] = []
    start = 0
    for index, gradient in enumerate(produced):
        blocks = layout.offsets[index] % SHARD_MULTIPLE == 0 == gradient.numel() % SHARD_MULTIPLE
        if gradient.numel() >= large and blocks and gradient.is_contiguous():
            segments += _copy(layout, range(start, layout.offsets[index]), copied, produced)
            segments.append(GradSegment(layout.offsets[index], gradient.view(-1)))
            start, copied = layout.offsets[index] + gradient.numel(), []
        else:
            copied.append(index)
    return (*segments, *_copy(layout, range(start, layout.numel), copied, produced))


def _copy(layout: Layout, elements: range, indices: list[int], produced: list[Tensor]) -> list[GradSegment]:
    """One segment with these elements, which holds the gradients of these parameters; none if it is empty."""
    if not elements:
        return []
    flat = torch.zeros(len(elements), dtype=produced[0].dtype, device=produced[0].device)
    begins = [layout.offsets[i] - elements.start for i in indices]
    copied = [produced[i] for i in indices]
    views = [flat[b : b + g.numel()].view(g.shape) for b, g in zip(begins, copied, strict=True)]
    if copied:
        torch._foreach_copy_(views, copied)
    return [GradSegment(elements.start, flat)]
