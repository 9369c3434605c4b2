"""Parameters that are held and gathered as 8-bit codes, one byte each (--fp8-param-gather).

The scales of the codes are the model's matter: `WeightEncoder` is what the engine needs of it. A unit with
such parameters lies in its slot as placement.py says. After each step every rank encodes its shard of the
master weights. Where weight differences cross nodes, it encodes its part of the reference when all messages
have been applied: the ranks that have the same part then write the same codes, and no codes cross nodes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megatron_zpp.distributed.comm_stream import copy
from megatron_zpp.exchange.sums import largest_over_ranks
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import within
from megatron_zpp.zero.sharded_unit import Unit


class WeightEncoder(Protocol):
    """Encodes weights by scales that change once per step; see model/fp8/weights.py."""

    @property
    def names(self) -> Collection[str]:
        """The parameters that are held as codes."""

    def attach(self, name: str, codes: Tensor) -> None:
        """Let the model multiply `codes`, bytes in the shape of a weight."""

    def begin(self) -> None:
        """Forget the maxima so far. Called before all weights are encoded anew."""

    def start(self, parts: Iterable[tuple[str, Tensor]], over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Begin, and without scales of earlier steps scale each weight by itself.

        `parts` of weights, (n,) fp32, are those that this rank encodes; `over_ranks` returns the largest
        magnitudes over all ranks.
        """

    def encode(self, name: str, numbers: Tensor, codes: Tensor) -> None:
        """Write the codes of a part of a weight, (n,) fp32, to bytes (n,); its maximum grows."""


class ProductScaling(Protocol):
    """Scales of 8-bit products, equal on all ranks, which change once per step: model/fp8/scaling.py."""

    def begin_step(self) -> None:
        """Called before the first micro-batch of a step."""

    def maxima(self) -> Tensor:
        """The largest finite magnitudes of this rank's tensors in a step."""

    def end_step(self, maxima: Tensor, found_inf: Tensor) -> None:
        """Set the scales of the next step; `maxima` are those of all ranks, `found_inf` skips the step.

        They take an all-reduce beside that of the gradients' norm: no operation sums some numbers and takes
        maxima of others, and the hops of an all-gather would grow with the ranks
        (docs/internals/performance.md).
        """

    def state(self) -> dict[str, Any] | None:
        """The state as JSON; None before the first step."""

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state`."""


class GatherSources:
    """Writes what the next gathers send."""

    def __init__(self, operations: Operations, codes: WeightEncoder | None) -> None:
        """`operations` encode messages, `codes` the weights that are held as codes."""
        self._operations, self._codes = operations, codes

    def begin_step(self) -> None:
        """All weights are about to change, and with them their codes."""
        if self._codes is not None:
            self._codes.begin()

    def write(self, unit: Unit, room: Tensor | None = None) -> None:
        """Write the gather source of a unit from its master weights: codes, a message, or its shard.

        Where weight differences are sent, that is what they are computed from, and codes follow later.
        Weights and messages go to `room` if that is given. Split master weights are the source already.
        """
        if unit.is_split:
            return
        if unit.encoded is not None and unit.message is None:
            self.encode(unit)
            return
        room = unit.gather_source if room is None else room
        if (format := unit.plan.codes) is not None:
            self._operations.quantize(unit.master.to(room.device)[None], room[None], format)
        else:
            copy(room, unit.master)

    def replace(self, unit: Unit) -> None:
        """The same for weights that no step has made; a reference begins with them, in bf16.

        Codes follow when their scales are known, which depend on the weights of all ranks.
        """
        if unit.encoded is None or unit.message is not None:
            self.write(unit)
        if unit.message is not None:
            unit.own_kept.copy_(unit.gather_source.bfloat16())

    def encode(self, unit: Unit) -> None:
        """Write this rank's codes of a unit whose weights are held so, and its other parameters beside."""
        assert self._codes is not None
        assert unit.encoded is not None
        owned, weights, codes = unit.encoded
        weights = weights.to(codes.device)  # those of an offloaded optimizer are on the CPU
        for name, part in unit.encoded.parts(unit.layout):
            self._codes.encode(name, weights[part], codes[part])
        if unit.layout.wide.start in owned:
            wide = within(unit.layout.wide, owned)
            room = codes[wide.start : 2 * wide.stop - wide.start].view(unit.parameters[0].dtype)
            room.copy_(weights[wide])

    def encode_all(self, units: Sequence[Unit], mesh: Mesh) -> None:
        """Encode the weights of all coded units: at a start, or after they were loaded.

        Every rank of the job must call it. Without scales of earlier steps each weight is scaled by itself.
        """
        assert self._codes is not None
        coded = [(unit, unit.encoded) for unit in units if unit.encoded is not None]
        parts = (
            (name, encoded.weights[part].to(unit.full.device))
            for unit, encoded in coded
            for name, part in encoded.parts(unit.layout)
        )
        self._codes.start(parts, partial(largest_over_ranks, mesh=mesh))
        for unit, _ in coded:
            self.encode(unit)
