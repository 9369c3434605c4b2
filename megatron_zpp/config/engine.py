"""What an engine does with a model."""

from dataclasses import dataclass, field

from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sharding and communication, the optimizer's numbers, and number formats."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
