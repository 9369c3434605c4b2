"""Which elements of which parameters are in a frame, and where a rank of another mesh finds what it needs.

A frame is what one rank sends of a run of elements of a unit: about an eighth of its shard. Its description
names parameters and boxes of them, so that islands need not have the same mesh, stage or units.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import SHARD_MULTIPLE, Box, Layout

LEAST, MOST = 1 << 16, 1 << 24  # elements of a frame; whole quantisation blocks

Sides = tuple[range, ...]  # a box, by dimension; unlike slices, ranges have a hash


class Part(NamedTuple):
    """A box of a parameter, and where it is in a frame."""

    name: str
    at: int  # the first element of the array that has it
    shape: tuple[int, ...]  # of that array
    here: Sides  # where the box is in the array
    whole: Sides  # and in the parameter


@dataclass(frozen=True)
class Frame:
    """The elements of a frame, and the parts of parameters among them; between these are gaps."""

    numel: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless all parts are inside."""
        for name, at, shape, here, whole in self.parts:
            numel = math.prod(shape)
            fits = len(shape) == len(here) == len(whole) and 0 <= at <= self.numel - numel
            sides = zip(shape, here, whole, strict=False)
            if not fits or not all(
                0 <= a.start < a.stop <= side and len(a) == len(b) and b[0] >= 0 for side, a, b in sides
            ):
                raise ValueError(f"not a part of a frame of {self.numel} elements: {name} {shape} at {at}")


class Move(NamedTuple):
    """A box that two frames have: in an array of each."""

    source: Part
    target: Part
    source_box: Box
    target_box: Box


class Chunk(NamedTuple):
    """Consecutive elements of this rank's shard of a unit, which make up a frame."""

    unit: int
    elements: slice  # of the shard
    frame: Frame


def chunks_of(unit: int, layout: Layout, mesh: Mesh) -> Iterator[Chunk]:
    """A rank's shard of a unit in runs of elements, without those that no parameter has."""
    shard = layout.shard(mesh)
    size = min(max(LEAST, len(shard) // 8 // SHARD_MULTIPLE * SHARD_MULTIPLE), MOST)
    for start in range(shard.start, shard.stop, size):
        elements = range(start, min(start + size, shard.stop))
        parts = tuple(
            Part(
                piece.placement.name,
                piece.at.start - start + block.elements.start - piece.elements.start,
                block.shape,
                _sides(here),
                _sides(whole),
            )
            for piece in layout.pieces_in(elements)
            for block in piece.blocks(mesh.rank)
            for here, whole in block.parts
        )
        within = slice(start - shard.start, elements.stop - shard.start)
        if parts:
            yield Chunk(unit, within, Frame(len(elements), parts))


def sends(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank is the first of those that have its shard of a unit."""
    axes = (mesh.node, mesh.replicas)
    return all(axis in layout.axes or axis.index(mesh.rank) == 0 for axis in axes)


def to_text(frames: Sequence[Frame]) -> str:
    """Frames as JSON."""

    def ends(sides: Sides) -> list[list[int]]:
        return [[side.start, side.stop] for side in sides]

    return json.dumps(
        [
            [frame.numel, [[p.name, p.at, p.shape, ends(p.here), ends(p.whole)] for p in frame.parts]]
            for frame in frames
        ],
        separators=(",", ":"),
    )


@cache
def from_text(text: str) -> tuple[Frame, ...]:
    """The inverse of `to_text`. Raises ValueError for other text."""

    def sides(ends: list[list[int]]) -> Sides:
        return tuple(range(start, stop) for start, stop in ends)

    try:
        return tuple(
            Frame(
                numel,
                tuple(
                    Part(name, at, tuple(shape), sides(here), sides(whole))
                    for name, at, shape, here, whole in parts
                ),
            )
            for numel, parts in json.loads(text)
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"an island sent no description of frames ({error})") from None


class Wanted:
    """What this rank takes of other ranks' frames; `same` are the chunks that have a frame as it is."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._by_name: dict[str, list[tuple[int, Part]]] = {}
        for number, chunk in enumerate(chunks):
            for part in chunk.frame.parts:
                self._by_name.setdefault(part.name, []).append((number, part))
        self.same = {chunk.frame: number for number, chunk in enumerate(chunks)}
        self._moves: dict[Frame, Mapping[int, Sequence[Move]]] = {}

    def choose(self, texts: Sequence[str]) -> list[list[int]]:
        """Of the ranks of an island, by the descriptions of their frames: the frames with something for us.

        What one rank has as this rank has it is not taken of another one, too.
        """
        described = [from_text(text) for text in texts]
        found = {frame for frames in described for frame in frames if frame in self.same}
        left = {self.same[frame] for frame in found}
        chosen: list[list[int]] = []
        for frames in described:
            chosen.append([])
            for number, frame in enumerate(frames):
                if frame in found:
                    found.discard(frame)
                    chosen[-1].append(number)
                elif frame not in self.same and self.moves(frame).keys() - left:
                    chosen[-1].append(number)
        return chosen

    def moves(self, frame: Frame) -> Mapping[int, Sequence[Move]]:
        """What the chunks take of a frame, by their numbers."""
        if frame not in self._moves:
            moves: dict[int, list[Move]] = {}
            for source in frame.parts:
                for number, target in self._by_name.get(source.name, ()):
                    common = tuple(
                        range(max(one.start, other.start), min(one.stop, other.stop))
                        for one, other in zip(source.whole, target.whole, strict=True)
                    )
                    if all(common):
                        boxes = (_moved(common, part.whole, part.here) for part in (source, target))
                        moves.setdefault(number, []).append(Move(source, target, *boxes))
            self._moves[frame] = moves
        return self._moves[frame]


def _sides(box: Box) -> Sides:
    return tuple(range(side.start, side.stop) for side in box)


def _moved(part: Sides, whole: Sides, to: Sides) -> Box:
    """A part of the box `whole`, where that is the box `to`."""
    moves = [there.start - here.start for here, there in zip(whole, to, strict=True)]
    return tuple(slice(side.start + move, side.stop + move) for side, move in zip(part, moves, strict=True))
