"""AdamW on states in fewer bytes than fp32 (--use-precision-aware-optimizer)."""

from typing import TypeAlias

from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.state_codes import Rounding
from megatron_zpp.zero.adamw import MOMENTS, KernelAdamW
from megatron_zpp.zero.optimizer import ShardSegment

# The scalars of a step, and the number of the step, which random bits depend on.
CompactScalars: TypeAlias = tuple[AdamWScalars, Tensor]


class CompactAdamW:
    """AdamW by the project's kernel: one pass, which rounds the states and writes 16-bit gather sources."""

    state_names = MOMENTS

    def __init__(
        self, config: OptimizerConfig, operations: Operations, quant_format: QuantFormat | None = None
    ) -> None:
        """`quant_format` is that of messages to gather from, which are then written from the weights."""
        self._plain, self._operations = KernelAdamW(config, operations, quant_format), operations
        self.writes_gather_source = self.accepts_16bit_gradients = quant_format is None

    def scalars(
        self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor
    ) -> CompactScalars:
        return self._plain.scalars(steps, learning_rate, divisor, found_inf), steps

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: CompactScalars) -> None:
        (exp_avg, exp_avg_sq), (exp_avg_scales, exp_avg_sq_scales) = shard.states, shard.scales
        self._operations.adamw_compact(
            shard.master,
            gradient,
            exp_avg,
            exp_avg_scales,
            exp_avg_sq,
            exp_avg_sq_scales,
            shard.gather_source,
            scalars[0],
            Rounding(scalars[1], shard.unit, shard.first),
            decayed=shard.decayed,
        )
