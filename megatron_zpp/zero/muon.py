"""Muon (https://kellerjordan.github.io/posts/muon/) for matrices, and AdamW for all other parameters.

The momentum of a matrix is an exponential average of its gradients; Newton-Schulz iteration makes all its
singular values about 1, and a factor by its shape makes the update. Rules and names are those of Megatron-LM.
Momentum is a state of this rank's shard; whole_matrices.py brings matrices together inside nodes.
"""

import math

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.exchange.segments import GradSegment, segments_inside
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Placement, within
from megatron_zpp.zero.model_states import MOMENTUM
from megatron_zpp.zero.newton_schulz import coefficients, orthogonalize
from megatron_zpp.zero.optimizer import DeviceOptimizer, Rates, RuleOf, Scalars, whole_unit, zero_states
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.weight_codes import GatherSources
from megatron_zpp.zero.whole_matrices import Held, Matrix, Room, Round, matrices_of, muon_share, rounds


class MuonOptimizer(DeviceOptimizer[Scalars]):
    """Steps of both, in rounds of units; it never waits for the device."""

    def __init__(
        self,
        config: OptimizerConfig,
        rule_of: RuleOf[Scalars],
        units: list[Unit],
        sources: GatherSources,
        mesh: Mesh,
        stream: CommStream,
        dtype: torch.dtype,
    ) -> None:
        """`rule_of`: of what is no matrix. `stream`: among the ranks of a node. `dtype`: of matmuls."""
        super().__init__(rule_of, units, sources)
        self._config, self._stream, self._dtype = config, stream, dtype
        self._coefficients = coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        self.state_names = (MOMENTUM, *self.state_names)
        every = [matrices_of(index, unit.layout) for index, unit in enumerate(units)]
        held = {index: Held(unit.layout, unit.plan.axes) for index, unit in enumerate(units) if every[index]}
        works = rounds(every, len(mesh.ranks(*mesh.inside_node)))
        share = muon_share(held, mesh, config.muon_num_ns_steps)
        room = torch.empty(share.room, dtype=dtype, device=units[0].full.device)
        self._rounds = {work[0].unit: Round(work, held, mesh, Room(room)) for work in works}
        self._updates: dict[int, tuple[range, Tensor]] = {
            index: (work.elements[index], update)
            for work in self._rounds.values()
            for index, update in work.updates.items()
        }
        for index, (unit, states) in enumerate(zip(units, self.states, strict=True)):
            states |= zero_states(unit, (MOMENTUM,), self._updates[index][0] if every[index] else range(0))
        self._scaled = [
            [
                (part.elements, self._scale(each))
                for each in matrices
                for part in held[index].parts(each, mesh)
            ]
            for index, matrices in enumerate(every)
        ]

    def elements(self, unit: Unit, name: str) -> range:
        """See Optimizer.elements."""
        matrices = unit.layout.hull(of_matrices=True)
        if name == MOMENTUM:
            return matrices
        return unit.layout.hull(of_matrices=False) if matrices else whole_unit(unit, name)

    def _changes(self, placement: Placement) -> bool:
        return not placement.matrices

    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        """See Optimizer.begin_step."""
        super().begin_step(rates, divisor, found_inf)
        kept, rate = 1 - found_inf.float(), rates[0]
        self._divisor, self._skipped = divisor, found_inf.bool()
        self._newest = kept * (1 - self._config.muon_momentum)  # of a gradient in the average
        self._shrink = 1 - kept * rate * self._config.weight_decay
        self._step = -kept * rate

    def update(self, index: int) -> None:
        """See Optimizer.update."""
        if index in self._rounds:
            work = self._rounds[index]
            for each in work.updates:
                self._write_update(each)
            work.gather(self._stream)
            for batch in work.batches:
                batch.copy_(orthogonalize(batch, self._coefficients))
            work.scatter(self._stream)
        if index not in self._updates:
            super().update(index)
            return
        unit, (elements, update) = self._units[index], self._updates[index]
        for part, scale in self._scaled[index]:
            change = update[within(part, elements)].float() * (self._step * scale)
            unit.master[within(part, unit.owned)].mul_(self._shrink).add_(change)
        self._change(index, unit.gradients, None)
        if not unit.gathers_from_master or unit.layout.coded:
            self._sources.write(unit)

    def _write_update(self, index: int) -> None:
        """Let the momentum of a unit take in the gradient, and write what is made orthogonal."""
        unit, (elements, update), config = self._units[index], self._updates[index], self._config
        momentum = self.states[index][MOMENTUM]
        first = elements.start - unit.owned.start
        for start, flat in segments_inside(unit.gradients, range(first, first + len(elements))):
            part = GradSegment(start, flat)
            gradient = torch.where(self._skipped, 0.0, flat.float() / self._divisor)
            average = part.of(momentum).lerp_(gradient, self._newest)
            if config.muon_nesterov:
                average = gradient.lerp(average, config.muon_momentum)
            part.of(update).copy_(average)

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
