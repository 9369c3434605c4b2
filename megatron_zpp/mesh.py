"""Named axes of ranks, and the groups that they make: arithmetic on numbers, without process groups.

    axis       ranks along it                          what they do
    node       one of each node                        exchange over the slow link
    local      data ranks of a node                    read different samples, exchange over the fast link
    context    ranks of a node with the same samples   have parts of the tokens of each sample
    tensor     ranks of a node with the same tokens    have parts of each matrix

The axes are in this order from the outermost to the innermost: rank r of a job with N nodes of L local,
C context and T tensor ranks is r = ((node · L + local) · C + context) · T + tensor. An axis is a value, and
so is each part of it, so that groups need no names.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Axis:
    """`size` ranks that are `stride` ranks apart. An axis of one rank sends nothing."""

    stride: int
    size: int

    @property
    def ranks(self) -> range:
        """Those along the axis, from rank 0 on."""
        return range(0, self.stride * self.size, self.stride)

    def index(self, rank: int) -> int:
        """The place of `rank` along the axis."""
        return rank // self.stride % self.size

    def cut(self, inner: int) -> tuple["Axis", "Axis"]:
        """The axis as groups of `inner` consecutive places: the axis of groups, and that of places in them.

        Raises ValueError unless `inner` divides the axis.
        """
        if inner < 1 or self.size % inner:
            raise ValueError(f"an axis of {self.size} ranks has no groups of {inner}")
        return Axis(self.stride * inner, self.size // inner), Axis(self.stride, inner)

    def without(self, other: "Axis") -> "Axis":
        """The ranks of this axis that have one place along `other`. Raises ValueError if they are no axis."""
        end = self.stride * self.size
        first, stop = max(self.stride, other.stride), min(end, other.stride * other.size)
        if first >= stop:
            return self
        if first == self.stride and end % stop == stop % self.stride == 0:
            return Axis(stop, end // stop)
        if stop == end and end % first == first % self.stride == 0:
            return Axis(self.stride, first // self.stride)
        raise ValueError(f"{self} is not cut evenly along {other}")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of all axes, and one rank.

    A product of axes, the outermost first, is a group: the ranks that differ from this one along them alone.
    """

    nodes: int = 1
    local_ranks: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"a mesh of {' × '.join(map(str, self.sizes))} ranks has no rank {self.rank}")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of the axes, the outermost first."""
        return self.nodes, self.local_ranks, self.context_ranks, self.tensor_ranks

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def node_size(self) -> int:
        return math.prod(self.sizes[1:])

    @property
    def node(self) -> Axis:
        """Ranks of equal place in all nodes."""
        return Axis(self.node_size, self.nodes)

    @property
    def local(self) -> Axis:
        return Axis(self.context_ranks * self.tensor_ranks, self.local_ranks)

    @property
    def context(self) -> Axis:
        return Axis(self.tensor_ranks, self.context_ranks)

    @property
    def tensor(self) -> Axis:
        return Axis(1, self.tensor_ranks)

    @property
    def replicas(self) -> Axis:
        """Ranks of a node that compute different tokens with the same weights: data and context ranks."""
        return Axis(self.tensor_ranks, self.local_ranks * self.context_ranks)

    @property
    def inside_node(self) -> tuple[Axis, ...]:
        return self.replicas, self.tensor

    @property
    def samples(self) -> tuple[Axis, ...]:
        """The ranks that read different samples."""
        return self.node, self.local

    @property
    def data_ranks(self) -> int:
        """How many places `samples` has."""
        return self.nodes * self.local_ranks

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different samples."""
        return self.index(*self.samples)

    @property
    def tensor_rank(self) -> int:
        """This rank's place among those that share matrices with it."""
        return self.index(self.tensor)

    @property
    def shards(self) -> tuple[Axis, ...]:
        """The ranks that share the states of a unit.

        The node is innermost. So what the ranks of equal place in all nodes own together is contiguous in a
        unit, and so is what one rank of a node sums for all of them: no hop of a gather or of a reduction has
        to reorder anything.
        """
        return self.replicas, self.node

    def shards_beside(self, split: Axis) -> tuple[Axis, ...]:
        """`shards`, of ranks that have the same part of what is split along an axis.

        Raises ValueError for what is no axis of this mesh, and no part or product of its axes.
        """
        if min(split.stride, split.size) < 1 or self.world_size % (split.stride * split.size):
            raise ValueError(f"{split} is no axis of {' × '.join(map(str, self.sizes))} ranks")
        return tuple(axis.without(split) for axis in self.shards)

    @property
    def shard_ranks(self) -> int:
        """How many places `shards` has: as many ranks have different tokens."""
        return self.data_ranks * self.context_ranks

    def index(self, *axes: Axis) -> int:
        """This rank's place in the product of `axes`."""
        place = 0
        for axis in axes:
            place = place * axis.size + axis.index(self.rank)
        return place

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks of the product of `axes` that this rank is in, by their places."""
        first = self.rank - sum(axis.stride * axis.index(self.rank) for axis in axes)
        steps = product(*(range(0, axis.stride * axis.size, axis.stride) for axis in axes))
        return tuple(first + sum(step) for step in steps)

    def node_of(self, rank: int) -> int:
        return rank // self.node_size

    def share_a_node(self, ranks: Iterable[int]) -> bool:
        """Whether `ranks` exchange over the fast link alone."""
        return len({self.node_of(rank) for rank in ranks}) == 1

    def at(self, rank: int) -> "Mesh":
        """The same mesh as another rank sees it."""
        return replace(self, rank=rank)
