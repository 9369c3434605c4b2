"""Makes what a communication plan names: streams, the gathers of weights, the reduction of gradients."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.exchange.gathers import Leg
from megatron_zpp.exchange.reductions import Reduction
from megatron_zpp.exchange.rooms import Buffer, lanes
from megatron_zpp.exchange.route import Route
from megatron_zpp.mesh import Axis
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication_plan import CommunicationPlan

_WEIGHTS, _GRADIENTS, _SUMS, _MATRICES = "weights", "gradients", "sums", "matrices"


class Legs(NamedTuple):
    """What is gathered of a unit; see UnitPlan."""

    sums: Leg
    bring: Leg
    fill: Leg


class Communication:
    """What a run's weights and gradients go through.

    `legs` has those of each unit. `reductions` sum gradients to shards, by route. Matrices that Muon trains
    come together inside nodes on the stream `matrices`, None where there are none.
    """

    def __init__(
        self,
        plan: CommunicationPlan,
        make_comm_stream: Callable[[Sequence[int]], CommStream],
        operations: Operations,
    ) -> None:
        """Every rank makes the same streams in the same order. Codes need `operations`."""
        self.plan, self._make_comm_stream = plan, make_comm_stream
        self._streams: dict[tuple[str, tuple[Axis, ...]], list[CommStream]] = {}
        self._legs: dict[tuple[str, Route], Leg] = {}
        self.legs = [
            Legs(self._leg(_SUMS, each.sums), self._leg(_WEIGHTS, each.bring), self._leg(_WEIGHTS, each.fill))
            for each in plan.units
        ]
        self.reductions: dict[Route, Reduction] = {}
        for route, layouts in plan.reductions.items():
            streams = [self._streams_of(_GRADIENTS, route, at) for at in range(len(route))]
            if not route:
                streams = [self._streams.setdefault((_GRADIENTS, ()), [make_comm_stream([plan.mesh.rank])])]
            self.reductions[route] = Reduction(route, layouts, plan.mesh, streams, operations, plan.made)
        self.matrices: CommStream | None = None
        if any(each.layout.hull(of_matrices=True) for each in plan.trained):
            self.matrices = make_comm_stream(plan.mesh.ranks(*plan.mesh.inside_node))
            self._streams[_MATRICES, plan.mesh.inside_node] = [self.matrices]

    @property
    def comm_streams(self) -> list[CommStream]:
        return list(chain.from_iterable(self._streams.values()))

    def memory(self, stages: Route, buffer: Buffer, at: int = 0) -> Tensor:
        """Memory for what stage `at` of weights sends or fills. Every rank must make the same."""
        return self._streams_of(_WEIGHTS, stages, at)[0].zeros(*buffer)

    def _leg(self, what: str, stages: Route) -> Leg:
        if (what, stages) not in self._legs:
            streams = [self._streams_of(what, stages, at) for at in range(len(stages))]
            room = self.plan.message_room(stages)
            self._legs[what, stages] = Leg(stages, self.plan.mesh, streams, room)
        return self._legs[what, stages]

    def _streams_of(self, what: str, route: Route, at: int) -> list[CommStream]:
        """The streams of a stage. Weights, gradients and sums do not share any, so that they overlap.

        A reduction inside a node that follows another one runs on the stream of that, so routes that begin
        otherwise have a communicator of their own for it.
        """
        axes, count = route[at].axes, lanes(route, at, self.plan.mesh)
        follows = what == _GRADIENTS and at > 0 and count == 1
        streams = self._streams.setdefault((what, (*route[0].axes, *axes) if follows else axes), [])
        while len(streams) < count:
            streams.append(self._make_comm_stream(self.plan.mesh.ranks(*axes)))
        return streams[:count]
