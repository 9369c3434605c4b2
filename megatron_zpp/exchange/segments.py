"""Parts of a whole gradient, each wherever it lies."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from megatron_zpp.placement import SHARD_MULTIPLE, Layout

_ADDRESSES = 16  # bytes that kernels load at a time


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
            inside = flat if end - begin == len(flat) else flat[begin - start : end - start]
            yield GradSegment(begin - owned.start, inside)


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
    do, and at addresses from which kernels load 16 bytes: a gradient may be a view into a larger one.
    """
    segments: list[GradSegment] = []
    neighbours: list[Tensor] = []  # and zeros in the gaps behind them
    zeros = produced[0].new_zeros(layout.numel - sum(map(Tensor.numel, produced)))
    start, following = 0, (*layout.offsets[1:], layout.numel)
    for gradient, begin, after in zip(produced, layout.offsets, following, strict=True):
        end = begin + gradient.numel()
        gradient = gradient.clone() if gradient.data_ptr() % _ADDRESSES else gradient
        if gradient.numel() >= large and begin % SHARD_MULTIPLE == 0 == end % SHARD_MULTIPLE:
            segments += _joined(start, neighbours)
            segments.append(GradSegment(begin, gradient.reshape(-1)))
            start, neighbours = end, []
        else:
            neighbours.append(gradient)
        if end < after:
            neighbours.append(zeros[: after - end])
    return (*segments, *_joined(start, neighbours))


def _joined(start: int, neighbours: list[Tensor]) -> list[GradSegment]:
    """The segment of gradients that follow one another from element `start` on; none without elements."""
    flat = _flatten_dense_tensors(neighbours) if neighbours else torch.empty(0)
    return [GradSegment(start, flat)] if len(flat) else []
