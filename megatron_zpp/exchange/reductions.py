"""Runs the reductions of a gradient route: sums the gradients of a unit over ranks, in fp32.

The stages inside nodes run one after the other on one stream. A stage between nodes that follows them has two
streams of its own. Exchanges take turns on them, and what they send lies in one of two buffers in turn, so
that one sum is on the wire while the next is made inside the node:

    gradient, or a chunk of it -> stages inside the node -> sums -> stage between nodes -> total
                 what a group has accumulated ->

A stage alone runs on its streams in turn. Chunks are those of `route.chunks`.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, all_of
from megatron_zpp.exchange.codecs import Codec, Feedback, Rotation, clear
from megatron_zpp.exchange.plain import InPlace
from megatron_zpp.exchange.rooms import HopRoom, accumulating, fused, reduction_rooms
from megatron_zpp.exchange.route import Route, Stage, axes_of, chunks, nbytes, plain
from megatron_zpp.exchange.segments import GradSegment, join
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import Layout


class Target(NamedTuple):
    """What a reduction writes: this rank's shard of the sum, or a chunk of it.

    `squares` (n / SQUARES_BLOCK,) get what `sum_squares` finds in `total` (n,) afterwards; given only if no
    stage sends codes. `rotation` is that of the unit in this step; given only if the last stage rotates.
    `feedback` is that of the last stage, of what this rank sends: a row for each rank of the stage.
    """

    total: Tensor  # (n,) fp32
    add: bool = False  # to what is there; else it is overwritten
    squares: Tensor | None = None
    rotation: Rotation | None = None
    feedback: Feedback | None = None

    def chunk(self, elements: range) -> "Target":
        """The target of these elements of the shard."""
        here, feedback = slice(elements.start, elements.stop), self.feedback
        if feedback is not None:
            feedback = feedback._replace(lost=feedback.lost[:, here])
        return self._replace(total=self.total[here], feedback=feedback)


class Lane:
    """A stream of a stage with its buffers, in bytes; they have room for the largest chunk of a unit."""

    def __init__(self, stream: CommStream, room: HopRoom, exact: int = 0) -> None:
        """`exact`: for so many sums in fp32."""
        self.stream = stream
        self.sent, self.received = (stream.zeros(nbytes, torch.uint8) for nbytes in room)
        self.exact = stream.zeros(exact, torch.float32)  # what is encoded
        self.sending = Pending()  # the work that reads `sent`


class Hop:
    """One stage of a route, as this rank runs it.

    Before it, this rank has shards of a unit in `rows` runs, which are exchanged one by one; after it,
    `part` shards.
    """

    def __init__(
        self, stage: Stage, cut: Sequence[Axis], layout: Layout, mesh: Mesh, operations: Operations
    ) -> None:
        """`cut`: the axes of the stage and of those before it. Any layout of the run says the same."""
        self.stage, self.ranks, self.place = stage, stage.ranks, mesh.index(*stage.axes)
        runs = layout.ranges(mesh, cut)
        self.rows, self.part = len(runs), sum(map(len, runs)) // layout.shard_numel
        self._operations, format = operations, stage.format
        self.codec = None if isinstance(format, torch.dtype) else Codec(format, operations)

    def exchange(
        self, lane: Lane, shards: Tensor, rotation: Rotation | None, feedback: Feedback | None = None
    ) -> Tensor:
        """Encode `shards` (ranks · p, n), and return the messages for this rank: (ranks, bytes)."""
        assert self.codec is not None
        size = nbytes(self.stage.format, shards.numel() // self.ranks)
        sent, received = (buffer[: self.ranks * size] for buffer in (lane.sent, lane.received))
        messages = sent.view(self.ranks, size)
        if feedback is not None and rotation is None:
            shards = lane.exact[: shards.numel()].view(shards.shape).copy_(shards)
        self.codec.encode(shards, messages, rotation, 0, feedback)
        lane.stream.all_to_all(received, sent)
        return received.view(self.ranks, size)

    def sum(self, lane: Lane, shards: Tensor, target: Target) -> None:
        """Sum this rank's part of `shards` (rows · ranks · p, n) to the `target` (rows · p · n,)."""
        total, add, squares, rotation, feedback = target
        for row, part in zip(shards.chunk(self.rows), total.chunk(self.rows), strict=True):
            if self.codec is not None:
                messages = self.exchange(lane, row, rotation, feedback)
                self.codec.sum_into(messages, part, rotation, self.place * len(part), add=add)
                continue
            received = lane.received[: row.nbytes].view(row.dtype)
            lane.stream.all_to_all(received, row.view(-1))
            self.add_up(received, part, add=add, squares=squares)

    def add_up(self, received: Tensor, total: Tensor, *, add: bool, squares: Tensor | None) -> None:
        """Sum what has arrived (ranks · n,) as it is to `total` (n,), in the order of the ranks.

        The volume is that of a reduce-scatter, but 16-bit numbers stay 16 bits on the wire without a rounding
        in the sum, whose bits are those of one process that accumulates the ranks' batches in turn.
        """
        self._operations.sum_parts(received.view(self.ranks, -1), total, add=add, squares=squares)


class Part(NamedTuple):
    """A chunk of a unit, on its way to `target`."""

    target: Target
    source: Tensor  # (shards, n)
    hop: Hop | None  # inside the node, with this input; None: the nodes exchange it
    lanes: tuple[Lane, Lane]  # of the first hop, whose stream it takes, and of `hop`
    first: int  # the number of the first element that this rank sends to other nodes

    def sum(self, total: Tensor | None = None) -> Tensor:
        """Sum it inside the node, to a `total` or to memory of its own; (shards, n)."""
        if self.hop is None:
            return self.source
        numel = self.source.shape[1]
        total = self.lanes[0].exact[: self.hop.part * numel] if total is None else total
        self.hop.sum(self.lanes[1], self.source, Target(total))
        return total.view(-1, numel)


class Reduction:
    """The reductions of the units of a run by one route.

    `streams` has those of each stage; every rank must make the same. `made`: the format in which a backward
    makes gradients.
    """

    def __init__(
        self,
        route: Route,
        layouts: Sequence[Layout],
        mesh: Mesh,
        streams: Sequence[Sequence[CommStream]],
        operations: Operations,
        made: torch.dtype,
    ) -> None:
        """Without stages there is one stream, of this rank alone, which sums over micro-batches."""
        self._route, self._operations = route, operations
        self._clearing = streams[-1][0]
        self._in_place: InPlace | None = None
        if not route or (len(route) == 1 and not route[0].codes and self._clearing.writes_peers):
            dtype = plain(route[0].format) if route else made
            numel = max(layout.numel for layout in layouts)
            self._in_place = InPlace(self._clearing, operations, numel * dtype.itemsize)
            return
        rooms = reduction_rooms(route, layouts, mesh, made, peer_writes=False)
        cuts = [axes_of(route[: at + 1]) for at in range(len(route))]
        hops = [Hop(stage, cut, layouts[0], mesh, operations) for stage, cut in zip(route, cuts, strict=True)]
        self._far = None if rooms.far is None else hops.pop()
        self._between = deque(Lane(stream, rooms.far) for stream in streams[-1] if rooms.far is not None)
        self._hops, self._fused = hops, fused(route)
        self._chunks = {shard: chunks(route, shard) for shard in {each.shard_numel for each in layouts}}
        self._turns: deque[tuple[Tensor, list[Lane]]] = deque()
        for first in streams[0][: rooms.turns]:
            near = [first, *(lanes[0] for lanes in streams[1:])]
            exact = [rooms.exact, *[0] * len(rooms.near)]  # the first lane has that of the turn
            lanes_of_turn = list(map(Lane, near, rooms.near, exact))
            self._turns.append((first.zeros(rooms.joined, rooms.dtype), lanes_of_turn))

    @property
    def at_once(self) -> bool:
        """Whether `reduce` can run a route that accumulates, where a step has one micro-batch."""
        return self._in_place is not None or len(self._hops) == 1

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """Sum `sent`, a whole gradient in segments, which stay where they are until the sum is waited for."""
        if (in_place := self._in_place) is not None:
            total, add, squares, *_ = target
            return self._clearing.submit(lambda: in_place.sum(sent, total, add=add, squares=squares))
        assert self.at_once or not accumulating(self._route), "accumulate, then reduce_accumulated"
        joined, lanes = self._next_turn()
        numel = len(target.total)
        shards, pending = self._joined(sent, joined, lanes[0].stream, numel)
        sources = [shards[:, chunk.start : chunk.stop] for chunk in self._chunks[numel]]
        return self._run(0, lanes, sources, target, pending)

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """Run the stage of every micro-batch alone; overwrite the fp32 `accumulated`, or add to it.

        `accumulated` has this rank's part of the unit, chunk by chunk.
        """
        hop, (joined, lanes) = self._hops[0], self._next_turn()
        shard_numel = len(accumulated) // hop.part
        shards, pending = self._joined(sent, joined, lanes[0].stream, shard_numel)
        for chunk in self._chunks[shard_numel]:
            source = shards[:, chunk.start : chunk.stop]
            target = Target(accumulated[hop.part * chunk.start : hop.part * chunk.stop], add)
            pending.append(lanes[0].stream.submit(partial(hop.sum, lanes[0], source, target)))
        return all_of(pending)

    def reduce_accumulated(self, accumulated: Tensor, target: Target) -> Pending:
        """Run the stages of a step on what has been accumulated, which is scratch memory afterwards."""
        (_, lanes), shards, numel = self._next_turn(), self._hops[0].part, len(target.total)
        parts = [accumulated[shards * chunk.start : shards * chunk.stop] for chunk in self._chunks[numel]]
        return self._run(1, lanes, [part.view(shards, -1) for part in parts], target, [])

    def _next_turn(self) -> tuple[Tensor, list[Lane]]:
        self._turns.rotate(-1)
        return self._turns[-1]

    def _number(self, shard_numel: int, chunk: range) -> int:
        """The number of the first element that this rank sends to other nodes: signs go by number.

        What a rank of each node sends lies together, one chunk after the other, and inside a chunk one node
        after the other. Without chunks numbers are places in the unit.
        """
        if self._far is None:
            return 0
        return self._far.ranks * (self._hops[0].place * shard_numel + chunk.start)

    def _joined(
        self, sent: Sequence[GradSegment], room: Tensor, stream: CommStream, shard_numel: int
    ) -> tuple[Tensor, list[Pending]]:
        """The whole gradient as (shards, shard_numel), and the work that puts it together."""
        if self._hops[0].codec is not None and len(sent) == 1:
            return sent[0].flat.view(-1, shard_numel), []
        numel = sum(len(segment.flat) for segment in sent)
        whole = room.view(sent[0].flat.dtype)[:numel]  # from which copy engines can send
        return whole.view(-1, shard_numel), [stream.submit(partial(join, sent, whole))]

    def _submit(self, part: Part) -> Pending:
        """Sum a chunk inside the node, and between nodes where there are several."""
        target, near, far = part.target, part.lanes[0].stream, self._far
        if far is None:
            assert part.hop is not None
            return near.submit(partial(part.hop.sum, part.lanes[1], part.source, target))
        self._between.rotate(-1)
        lane, numel = self._between[-1], len(target.total)
        size = nbytes(far.stage.format, numel)
        sent, received = (
            buffer[: far.ranks * size].view(far.ranks, size) for buffer in (lane.sent, lane.received)
        )
        sent_before = lane.sending

        def inside() -> None:
            sent_before.wait()
            self._encode(part, far, sent)

        summed = near.submit(inside)

        def between() -> None:
            summed.wait()
            lane.stream.all_to_all(received.view(-1), sent.view(-1))
            if far.codec is None:
                arrived = received.view(plain(far.stage.format))
                far.add_up(arrived, target.total, add=target.add, squares=target.squares)
            else:
                own = part.first + far.place * numel
                far.codec.sum_into(received, target.total, target.rotation, own, add=target.add)

        lane.sending = lane.stream.submit(between)
        return lane.sending

    def _encode(self, part: Part, far: Hop, messages: Tensor) -> None:
        """Sum a chunk inside the node, and write the sums as the other nodes get them: (nodes, bytes)."""
        _, _, _, rotation, feedback = part.target
        if far.codec is None:
            values = messages.view(plain(far.stage.format))
            direct = values.dtype == torch.float32 and part.hop is not None
            sums = part.sum(values.view(-1) if direct else None)
            if not direct:
                values.copy_(sums.view(values.shape))
        elif self._fused and part.hop is not None:
            assert isinstance(far.stage.format, QuantFormat)
            received = part.hop.exchange(part.lanes[0], part.source, None)
            self._operations.sum_quantize(received, messages, far.stage.format)  # never in fp32 memory
        else:
            far.codec.encode(part.sum().view(far.ranks, -1), messages, rotation, part.first, feedback)

    def _run(
        self, start: int, lanes: list[Lane], sources: list[Tensor], target: Target, pending: list[Pending]
    ) -> Pending:
        """Run the hops from `start` on, one inside the node at most, after the work that is `pending`.

        Chunk by chunk. Rotated codes are not zero in the gaps between parameters, where sums must be.
        """
        total, _, _, rotation, feedback = target
        hop = self._hops[start] if start < len(self._hops) else None
        of_hops = lanes[0], lanes[start] if hop is not None else lanes[0]
        for chunk, source in zip(self._chunks[len(total)], sources, strict=True):
            number = self._number(len(total), chunk)
            pending.append(self._submit(Part(target.chunk(chunk), source, hop, of_hops, number)))
        summed = all_of(pending)
        if rotation is None:
            return summed

        def clear_gaps() -> None:
            summed.wait()
            clear(total, rotation.gaps)
            if feedback is not None:
                clear(feedback.lost.view(-1), feedback.gaps)

        return all_of([*pending, self._clearing.submit(clear_gaps)])
