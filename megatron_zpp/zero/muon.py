"""Muon (https://kellerjordan.github.io/posts/muon/) for matrices, and AdamW for all other parameters.

The momentum of a matrix is an exponential average of its gradients; Newton-Schulz iteration makes all its
singular values about 1, and a factor by its shape makes the update. Rules and names are those of Megatron-LM.
Momentum is a state of this rank's shard; whole_matrices.py brings matrices together inside nodes.
What crosses between nodes, and why: docs/internals/measurements/muon.md.
"""

import math
from collections.abc import Sequence
from itertools import cycle, pairwise

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.exchange.segments import GradSegment
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import ALIGNMENT, Piece, overlap
from megatron_zpp.zero.held_states import MOMENTUM
from megatron_zpp.zero.muon_passes import MuonElements, MuonPasses, StepNumbers
from megatron_zpp.zero.newton_schulz import coefficients, orthogonalize_
from megatron_zpp.zero.optimizer import DeviceOptimizer, Group, Rates, RuleOf, Scalars, Write, zero_states
from megatron_zpp.zero.row_moments import RowMoments, by_parameter
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.whole_matrices import Matrix, Room, Round, muon_share, rounds


class MuonOptimizer(DeviceOptimizer[Scalars]):
    """Steps of both, in rounds of units; it never waits for the device."""

    def __init__(
        self,
        config: OptimizerConfig,
        rule_of: RuleOf[Scalars],
        units: list[Unit],
        write: Write,
        mesh: Mesh,
        stream: CommStream,
        dtype: torch.dtype,
    ) -> None:
        """`rule_of`: of what is no matrix. `stream`: among the ranks of a node. `dtype`: of matmuls."""
        super().__init__(rule_of, units, write, config.forms_of_moments)
        forms = {} if config.exp_avg_dtype == "fp32" else {MOMENTUM: config.exp_avg_dtype}
        self._config, self._stream, self._dtype = config, stream, dtype
        self._coefficients = coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        self.state_names = (MOMENTUM, *self.state_names)
        plans = [unit.plan for unit in units]
        works = rounds([unit.layout for unit in units], mesh.node_size)
        share = muon_share(plans, mesh, config.muon_num_ns_steps)
        device = units[0].full.device
        rooms = cycle([torch.empty(share.room, dtype=dtype, device=device) for _ in range(share.rooms)])
        made = [Round(work, plans, mesh, Room(room)) for work, room in zip(works, rooms, strict=False)]
        self._rounds = {work[0].unit: one for work, one in zip(works, made, strict=True)}
        # What follows in another room can be brought together while a round is worked on.
        self._following = dict(pairwise(made)) if share.rooms > 1 else {}
        self._bringing: dict[Round, Pending] = {}
        self._row_moments: dict[Round, RowMoments] = {}
        if (beta2 := config.muon_row_scaling_beta2) is not None:
            self._row_moments = {one: RowMoments(one, beta2, stream, device) for one in made}
            self.row_moments = by_parameter(self._row_moments.values())
        states = [overlap(unit.owned, self.elements(unit, MOMENTUM)) for unit in units]
        passes: type[MuonPasses] = MuonPasses
        if device.type == "cuda":
            from megatron_zpp.zero.fused.muon import FusedPasses

            passes = FusedPasses
        self._passes = {
            index: passes(
                MuonElements(
                    places=places,
                    scales=[self._scale(place.matrix) for place in places],
                    room=work.room.flat,
                    owned=units[index].owned,
                    states=states[index],
                    unit=index,
                    momentum=config.muon_momentum,
                    nesterov=config.muon_nesterov,
                )
            )
            for work in self._rounds.values()
            for index, places in work.places.items()
        }
        for unit, of_unit, elements in zip(units, self.states, states, strict=True):
            of_unit |= zero_states(unit, (MOMENTUM,), elements, forms)

    def elements(self, unit: Unit, name: str) -> range:
        matrices = unit.layout.hull(of_matrices=True)
        if name == MOMENTUM:
            return matrices
        if not matrices:
            return super().elements(unit, name)
        others = unit.layout.hull(of_matrices=False)
        return range(others.start, -(-others.stop // ALIGNMENT) * ALIGNMENT)  # whole blocks of states

    def _group_of(self, piece: Piece) -> Group | None:
        return None if piece.placement.matrices else super()._group_of(piece)

    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        super().begin_step(rates, divisor, found_inf)
        shrink = 1 - rates[0] * self._config.weight_decay
        self._numbers = StepNumbers(divisor, found_inf, shrink, -rates[0], self.steps)

    def update(self, index: int) -> None:
        if index in self._rounds:
            work = self._rounds[index]
            brought = self._bringing.pop(work, None) or self._bring(work)
            if following := self._following.get(work):
                self._bringing[following] = self._bring(following)
            brought.wait()
            for batch in work.batches:
                orthogonalize_(batch, self._coefficients)
            moments = self._row_moments.get(work)
            exchanged = moments.scale(work.batches, self._numbers.found_inf) if moments else Pending()
            work.scatter(self._stream)
            exchanged.wait()
        super().update(index)

    def _change(self, index: int, gradients: Sequence[GradSegment], source: Tensor | None) -> None:
        if passes := self._passes.get(index):
            unit = self._units[index]
            # A message is written when all weights have changed.
            passes.apply(unit.master, source if unit.plan.codes is None else None, self._numbers)
        super()._change(index, gradients, source)

    def _bring(self, work: Round) -> Pending:
        """Let the momentum of a round's units take in their gradients, and bring its matrices together."""
        for each in work.places:
            gradients, momentum = self._units[each].grad.segments, self.states[each][MOMENTUM].values
            self._passes[each].average(gradients, momentum, self._numbers)
        return work.gather(self._stream)

    def _scale(self, matrix: Matrix) -> float:
        """The factor of an update by the shape of its matrix, as --muon-scale-mode says."""
        rows, columns = matrix.shape
        mode = self._config.muon_scale_mode
        scales = {
            "spectral": math.sqrt(max(rows, columns)),
            "shape_scaling": math.sqrt(max(1.0, rows / columns)),
            "unit_rms_norm": math.sqrt(rows / columns),
        }
        return scales[mode] * self._config.muon_extra_scale_factor
