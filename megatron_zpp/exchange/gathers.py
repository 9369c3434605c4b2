"""Runs the gathers of a weight route, and of sums of gradients: brings the parts of a unit together.

Consecutive gathers of one verb and format that run equally often are a leg. A leg in a dtype lands where the
weights belong, in the slot or in the part of the unit that is kept. A leg of codes relays the messages, and
what arrives at its end is decoded, or added to a reference:

    shard -> node -> between    once per step, into what is kept
                     members    at a use, from what is kept into the slot

A stage runs while the one before it, on another stream, has the next unit on the wire.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.exchange.route import Route, axes_of
from megatron_zpp.mesh import Mesh


@dataclass
class Relay:
    """A stream of a stage, where its messages arrive, and the work of another stream that reads them."""

    stream: CommStream
    buffer: Tensor  # of bytes; empty where parts land in place
    reading: Pending = field(default_factory=Pending)


class Leg:
    """Stages of one verb and format, one after the other; without stages there is nothing to do.

    `streams` has those of each stage; every rank must make the same. `room`: the largest message of a shard,
    in bytes, in any step; 0 for a leg in a dtype.
    """

    def __init__(self, stages: Route, mesh: Mesh, streams: Sequence[Sequence[CommStream]], room: int) -> None:
        self.stages, shards = stages, 1
        later = [stages[at:] for at in range(len(stages) + 1)]
        # The place of a rank's part among those that later stages bring together: the last axis is outermost.
        self._places = [mesh.index(*axes_of(each[::-1])) for each in later]
        self._parts = [math.prod(stage.ranks for stage in each) for each in later]
        self._relays: list[deque[Relay]] = []
        for at, (stage, lanes) in enumerate(zip(stages, streams, strict=True)):
            shards *= stage.ranks
            following = streams[at + 1][0] if at + 1 < len(stages) else None
            turns = max(2 if following is not None and room else 1, len(lanes))
            relays = [
                Relay(lane, (following or lane).zeros(shards * room, torch.uint8))
                for lane in islice(cycle(lanes), turns)
            ]
            self._relays.append(deque(relays))

    def run(
        self,
        source: Tensor,
        target: Tensor,
        take: Callable[[Tensor], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Gather every rank's `source` (n,) `after` the work that fills it, into `target` (ranks · n,).

        The source may be its own place in the target; one in another dtype is cast. Messages of codes have a
        `take`, which gets all of them, one behind the other, and writes the target.
        """
        part, filled, read_before = source, after or Pending(), None
        for at, relays in enumerate(self._relays):
            relays.rotate(-1)
            relay = relays[-1]
            if take is not None:
                gathered = relay.buffer[: self.stages[at].ranks * len(part)]
            else:
                gathered = self._part(target, at + 1)
            last = take if at + 1 == len(self._relays) else None
            done = relay.stream.submit(
                partial(self._gather, relay, relay.reading, filled, part, gathered, target, last)
            )
            if read_before is not None:
                read_before.reading = done
            part, filled, read_before = gathered, done, relay
        return filled

    @property
    def first_stream(self) -> CommStream:
        """The stream of the next run's first stage."""
        return self._relays[0][0].stream

    def own(self, target: Tensor) -> Tensor:
        """What this rank brings, as a part of what the leg fills."""
        return self._part(target, 0)

    def _gather(
        self,
        relay: Relay,
        read: Pending,
        filled: Pending,
        part: Tensor,
        gathered: Tensor,
        target: Tensor,
        take: Callable[[Tensor], None] | None,
    ) -> None:
        filled.wait()
        read.wait()
        if part.dtype != gathered.dtype:
            own = self.own(target)
            own.copy_(part)
            part = own
        relay.stream.all_gather(gathered, part)
        if take is not None:
            take(gathered)

    def _part(self, target: Tensor, stages: int) -> Tensor:
        """What this rank has of `target` after so many stages."""
        parts = self._parts[stages]
        return target if parts == 1 else target.view(parts, -1)[self._places[stages]]
