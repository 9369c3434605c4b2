"""The whole configuration of a run, and the command line that makes it."""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import LearningRateConfig, OptimizerConfig, PrecisionConfig
from megatron_zpp.config.options import UsageError, fits, parse_all, refusal
from megatron_zpp.config.run import (
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    TrainingConfig,
)
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.zero import ZeroConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run was told. Parts are read by the code they configure and by nothing else."""

    model: ModelConfig
    recompute: RecomputeConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    training: TrainingConfig
    learning_rate: LearningRateConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    zero: ZeroConfig
    distributed: DistributedConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        """Raises ValueError for settings of different parts that contradict each other."""
        _check_lengths(self.training, self.learning_rate)
        _check_recompute(self.model, self.recompute)
        if self.precision.grad_reduce_in_bf16 and self.zero.zero_quantized_gradients:
            raise refusal(
                "--grad-reduce-in-bf16", "(given)", "contradicts --zero-quantized-gradients; give one"
            )
        if self.evaluation.full_validation and self.data.mock_data:
            raise refusal("--full-validation", "(given)", "--mock-data has no end; use --eval-iters")
        if self.tokenizer.tokenizer_type is None:
            raise refusal("--tokenizer-type", "(not given)", "give the tokenizer that made the data")

    def needed_splits(self) -> tuple[str, ...]:
        """The splits that the run reads: train; valid if it evaluates; test if there is one as well."""
        if not self.evaluation.enabled:
            return ("train",)
        data = self.data
        has_test = data.mock_data or bool(data.test_data_path) or (data.data_path and data.shares[2] > 0)
        return ("train", "valid", "test") if has_test else ("train", "valid")

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values, by part and field."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def shared_settings(self) -> dict[str, Any]:
        """What all ranks must have been told alike: everything but where each of them reports."""
        return {part: values for part, values in self.to_json().items() if part != "logging"}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Config":
        """The inverse of `to_json`; raises ValueError for what this version does not know."""
        parts = {}
        for name, part in typing.get_type_hints(cls).items():
            hints, values = typing.get_type_hints(part), saved.get(name, {})
            if not isinstance(values, dict):
                raise ValueError(f"saved configuration: {name} is no object")
            parts[name] = {}
            for key, value in values.items():
                if key not in hints:
                    raise ValueError(f"saved configuration: {name}.{key} is not a setting of this version")
                parts[name][key] = tuple(value) if isinstance(value, list) else value
                if not fits(parts[name][key], hints[key]):
                    raise ValueError(f"saved configuration: {name}.{key} cannot be {value!r}")
            parts[name] = part(**parts[name])
        return cls(**parts)


def parse_args(argv: Sequence[str], prog: str = "pretrain_gpt.py") -> Config:
    """The configuration of a command line. Raises UsageError, in one line, when it cannot be right."""
    parts = typing.get_type_hints(Config)
    description = "Pretrain a GPT. README.md shows whole command lines."
    parsed = parse_all(parts, prog, description, argv)
    try:
        return Config(**parsed)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_lengths(training: TrainingConfig, learning_rate: LearningRateConfig) -> None:
    """The schedule is told in the unit of the run: iterations or samples."""
    if training.train_samples is None:
        own, other = "iters", "samples"
    else:
        own, other = "samples", "iters"
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        value = getattr(learning_rate, name)
        if value:
            flag = "--" + name.replace("_", "-")
            right = flag.replace(other, own)
            raise refusal(flag, value, f"the run is told by --train-{own}; use {right}")


def _check_recompute(model: ModelConfig, recompute: RecomputeConfig) -> None:
    if recompute.recompute_num_layers and recompute.recompute_num_layers > model.num_layers:
        raise refusal(
            "--recompute-num-layers",
            recompute.recompute_num_layers,
            f"must be at most --num-layers {model.num_layers}",
        )
