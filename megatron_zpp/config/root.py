"""The whole configuration of a run, and the command line that makes it."""

import argparse
import dataclasses
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zpp.config.compilation import CompilationConfig
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.config.model import AttentionConfig, ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import LearningRateConfig, OptimizerConfig, PrecisionConfig
from megatron_zpp.config.options import (
    AUTO,
    Options,
    UsageError,
    fits,
    make_parser,
    option_error,
    parse_known,
    usage_errors,
)
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.run import (
    HUGGINGFACE,
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    TimingConfig,
    TrainingConfig,
)
from megatron_zpp.config.shapes.tensor_parallel import check_context_ranks, check_fp8, check_tensor_ranks
from megatron_zpp.config.sources.checkpoint_arguments import SavedArguments, obey_checkpoint
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.sources.settings_file import (
    DeepSpeedFile,
    SettingsFile,
    obey_settings,
    write_settings,
)
from megatron_zpp.config.tokenizer import TokenizerConfig, resolved_type
from megatron_zpp.config.zero import ZeroConfig

if TYPE_CHECKING:
    from megatron_zpp.config.sources.huggingface import ReadModel


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Each part is read only by the code that it configures."""

    model: ModelConfig
    attention: AttentionConfig
    recompute: RecomputeConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    training: TrainingConfig
    learning_rate: LearningRateConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    zero: ZeroConfig
    distributed: DistributedConfig
    islands: IslandsConfig
    compilation: CompilationConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    timing: TimingConfig
    plan: PlanConfig

    def __post_init__(self) -> None:
        """Raise ValueError if settings of different parts contradict each other."""
        model, training, precision, zero = self.model, self.training, self.precision, self.zero
        self.learning_rate.check_unit("iters" if training.train_samples is None else "samples")
        if (self.recompute.recompute_num_layers or 0) > model.num_layers:
            raise self.recompute.error(
                "recompute_num_layers", f"must be at most --num-layers {model.num_layers}"
            )
        if precision.grad_reduce_in_bf16 and zero.zero_quantized_gradients:
            raise precision.error("grad_reduce_in_bf16", "contradicts --zero-quantized-gradients; give one")
        if self.evaluation.full_validation and self.data.mock_data:
            raise self.evaluation.error("full_validation", "--mock-data is endless; use --eval-iters")
        if (
            self.data.dataset_order == "megatron" and training.seed >= 2**32
        ):  # numpy's RandomState has no more
            raise training.error("seed", f"must be below {2**32} with --dataset-order megatron")
        if self.optimizer.fused_backend == "apex" and (beyond := self.beyond_apex):
            raise beyond[0][0].error(beyond[0][1], "needs --fused-backend torch")
        self.islands.check_run(training, self.checkpoint)
        if self.plan.plan_island_mbit is not None and self.islands.islands_at is None:
            raise self.plan.error("plan_island_mbit", "needs --islands-at")
        self._check_auto()
        self._check_order_of_sums()
        dtype, coded = precision.compute_dtype("cuda"), precision.fp8_param_gather
        if model.fp32_residual_connection and not (precision.bf16 or precision.fp16):
            raise model.error("fp32_residual_connection", "needs --bf16 or --fp16; in fp32 it always is")
        if model.fp32_residual_connection and model.norm_placement == "after":
            fix = "attention and MLP read no norm with --norm-placement after; needs before or both"
            raise model.error("fp32_residual_connection", fix)
        self.optimizer.check_weights(zero, dtype, coded=coded)
        if precision.fp8:
            check_fp8(model, training, precision, zero, self.distributed.context_parallel_size)
        tensor_ranks = self.distributed.tensor_model_parallel_size
        check_tensor_ranks(model, tensor_ranks, fp8=precision.fp8)
        context_ranks, comm_type = self.distributed.context_parallel_size, self.distributed.cp_comm_type
        check_context_ranks(model, context_ranks, tensor_ranks, comm_type)
        if self.tokenizer.tokenizer_type is None:
            raise self.tokenizer.error("tokenizer_type", "give the tokenizer that made the data")
        if self.plan.dry_run and self.distributed.device == "cpu":
            raise self.plan.error("dry_run", "plans for GPUs; omit --device cpu")

    @property
    def beyond_apex(self) -> list[tuple[Options, str]]:
        """The settings, by group and field, that NVIDIA apex's norms and AdamW cannot obey."""
        rate, model, optimizer, zero = self.learning_rate, self.model, self.optimizer, self.zero
        settings: list[tuple[Options, str, bool]] = [
            (rate, "decoupled_lr", rate.decoupled_lr is not None),
            (model, "use_mup", model.width_ratio != 1),
            (model, "apply_layernorm_1p", model.apply_layernorm_1p),
            (model, "fp32_residual_connection", model.fp32_residual_connection),
            (optimizer, "optimizer", optimizer.optimizer == "muon"),
            (optimizer, "use_precision_aware_optimizer", optimizer.compact),
            (optimizer, "optimizer_in_backward", optimizer.optimizer_in_backward),
            (zero, "zero_offload_optimizer", zero.zero_offload_optimizer),
            (self.compilation, "compile", bool(self.compilation.compile)),
        ]
        return [(group, name) for group, name, given in settings if given]

    @property
    def automatic(self) -> tuple[str, ...]:
        """The flags whose value is auto."""
        values = {"--zero-stage": self.zero.zero_stage, "--micro-batch-size": self.training.micro_batch_size}
        return tuple(flag for flag, value in values.items() if value == AUTO)

    @property
    def may_resize(self) -> bool:
        """Whether micro-batches of another size leave the numerics alone: the loss, and 8-bit scales."""
        weighted = self.data.masks_loss and not self.training.calculate_per_token_loss
        return not (weighted or self.precision.fp8)

    def _check_auto(self) -> None:
        """Refuse a micro-batch size to be chosen where it changes the numerics, and a link for no plan."""
        if self.training.micro_batch_size == AUTO and not self.may_resize:
            fix = "would change the scales of --fp8, which are of a micro-batch; give a number"
            if not self.precision.fp8:
                what = "--dataset-packing best-fit" if self.data.packs else "--eod-mask-loss"
                fix = f"would change the loss with {what}; add --calculate-per-token-loss"
            raise self.training.error("micro_batch_size", fix)
        if self.plan.plan_link_gbit is not None and not (self.plan.dry_run or self.automatic):
            raise self.plan.error(
                "plan_link_gbit", f"needs --dry-run, --zero-stage {AUTO} or --micro-batch-size {AUTO}"
            )

    def _check_order_of_sums(self) -> None:
        """Refuse attention whose backward sums in no fixed order where --deterministic-mode asks for one."""
        cudnn = "its backward sums in no fixed order"
        flash3 = "not all its releases sum in a fixed order when they are told to"
        reasons = {"cudnn": cudnn, "fused": cudnn, "flash3": flash3}
        if self.training.deterministic_mode and (reason := reasons.get(self.attention.attention_backend)):
            fix = f"contradicts --deterministic-mode: {reason}; use auto or flash"
            raise self.attention.error("attention_backend", fix)

    def needed_splits(self) -> tuple[str, ...]:
        """Return the splits that the run reads: train; if it evaluates, valid, and test if it has data."""
        if not self.evaluation.enabled:
            return ("train",)
        data = self.data
        has_test = data.mock_data or bool(data.test_data_path) or (data.data_path and data.shares[2] > 0)
        return ("train", "valid", "test") if has_test else ("train", "valid")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, by part and field."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_yaml(self, comments: list[str]) -> str:
        """Return the text of a file with which --config gives these settings.

        A tokenizer in the checkpoint of --use-checkpoint-args is omitted: --keep-last may remove its files.
        """
        parts, checkpoint = dict(vars(self)), self.checkpoint
        file = Path(self.tokenizer.tokenizer_model or self.tokenizer.vocab_file or "")
        inside = file.parent.name.startswith("iter_") and file.parents[1] == Path(checkpoint.load or "")
        if checkpoint.use_checkpoint_args and inside:
            del parts["tokenizer"]
        return write_settings(parts, comments)

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks: all but where a rank logs."""
        shared = self.to_json()
        logging = shared.pop("logging")
        reduced = ("log_interval", "log_params_norm")  # ranks log these together
        return shared | {"logging": {name: logging[name] for name in reduced}}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Config":
        """Return the inverse of `to_json`, without retired flags, and with what retired values became.

        Raises ValueError for settings that this version does not know.
        """
        from megatron_zpp.config.legacy.old_flags import RETIRED_FIELDS, RETIRED_VALUES

        parts: dict[str, Any] = {}
        for name, part in typing.get_type_hints(cls).items():
            hints, values = typing.get_type_hints(part), saved.get(name, {})
            if not isinstance(values, dict):
                raise ValueError(f"saved configuration: {name} is not an object")
            settings = {}
            for key, value in values.items():
                if retired := RETIRED_FIELDS.get(key):
                    retired.check_saved(f"saved configuration: {name}.{key}", value)
                    continue
                if key not in hints:
                    raise ValueError(f"saved configuration: {name}.{key} is not a setting of this version")
                settings[key] = tuple(value) if isinstance(value, list) else value
                if isinstance(value, str):
                    settings[key] = RETIRED_VALUES.get(key, {}).get(value, value)
                if isinstance(value, str) and fits((value,), hints[key]):  # an earlier version took one text
                    settings[key] = (value,)
                if not fits(settings[key], hints[key]):
                    raise ValueError(f"saved configuration: {name}.{key} cannot be {value!r}")
            parts[name] = part(**settings)
        return cls(**parts)


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line; `notes` to print once: old names, keys without effect.

    `pipeline_stages`: ranks among which another program would divide the layers. If there are several, they
    are data ranks here, and the run chooses its ZeRO stage by memory.
    """

    config: Config
    notes: tuple[str, ...]
    pipeline_stages: int = 1


def parse_args(argv: Sequence[str], prog: str = "pretrain_gpt.py") -> Config:
    """Return the configuration of a command line for one rank. Raises UsageError if it is wrong."""
    return parse_command_line(argv, prog).config


def parse_command_line(
    argv: Sequence[str],
    prog: str = "pretrain_gpt.py",
    ranks: Callable[[PlanConfig], int] = lambda plan: 1,
    saved: SavedArguments | None = None,
    node_ranks: Callable[[PlanConfig], int | None] = lambda plan: None,
    huggingface: "ReadModel | None" = None,
) -> CommandLine:
    """Parse current flags, old flags, a file of settings, which both win over, and DeepSpeed's file.

    `ranks` returns the number of ranks, real or planned, that a batch size in DeepSpeed's file is divided by.
    `saved` returns what --use-checkpoint-args takes from the checkpoint of --load and --ckpt-step; None: such
    flags change nothing.
    `node_ranks` returns the ranks of a node, real or planned, which tensor ranks must divide; None: unknown.
    `huggingface` reads what --load hf: gives; None: nothing.
    Raises UsageError, with a line for each refused flag and value, and ValueError as `huggingface` does.
    """
    parts = typing.get_type_hints(Config)
    files: dict[str, type[Options]] = {"deepspeed": DeepSpeedFile, "settings": SettingsFile}
    if {"-h", "--help"} & set(argv):
        from megatron_zpp.config.help import show_help

        show_help(prog, argv, parts | files)
    parser = make_parser(prog, "", parts | files)
    parser.lists_flags = "--help all"
    provided, others = _typed(parser, parts | files, argv)
    notes: tuple[str, ...] = ()
    if others is not None:
        others.obey(provided)
    stages = 1 if others is None else others.pipeline
    with usage_errors(provided.explain):
        settings = provided.get("settings.config")
        if settings is not None:
            notes += obey_settings(settings, parts, provided)
        notes += obey_checkpoint(provided, saved)
    if huggingface is not None and (provided.get("checkpoint.load") or "").startswith(HUGGINGFACE):
        from megatron_zpp.config.sources.huggingface import obey_model, read_model

        provided.check_refused()  # before anything is read
        model = read_model(provided, huggingface)
        with usage_errors(provided.explain):
            notes += obey_model(provided, model)
    with usage_errors(provided.explain):
        file = provided.get("deepspeed.deepspeed_config")
        if file is not None:
            from megatron_zpp.config.legacy.deepspeed import obey_file

            tensor_ranks = DistributedConfig(**provided.values["distributed"]).tensor_model_parallel_size
            data_ranks = ranks(PlanConfig(**provided.values["plan"])) // (tensor_ranks * stages)
            theirs = others is not None and others.gives("--deepspeed")
            notes += obey_file(file, provided, max(1, data_ranks), under_deepspeed=theirs)
        notes += _drop_loss_scale(provided)
        provided.notes = notes = (*(() if others is None else others.notes), *notes)
        if others is not None:
            with provided.collected():
                others.settle(provided)
        if stages > 1:
            from megatron_zpp.config.legacy.translate import divide_batch

            distributed = DistributedConfig(**provided.values["distributed"])
            sharing = distributed.tensor_model_parallel_size * distributed.context_parallel_size
            of_plan = ranks(PlanConfig(**provided.values["plan"]))
            notes += divide_batch(provided, stages, max(1, of_plan // sharing))
        padded = others is None or not others.gives("--no-pad-vocab-size", "--disable-pad-vocab-size")
        notes += _drop_vocab_size(provided, padded=padded)
        if provided.get("plan.dry_run"):
            from megatron_zpp.config.sources.plan_defaults import assume

            notes += assume(provided)
        parsed = provided.made(parts)
        provided.check_refused()
        check_tensor_ranks(  # before Config does, which cannot name the sizes that suit a node too
            parsed["model"],
            parsed["distributed"].tensor_model_parallel_size,
            fp8=parsed["precision"].fp8,
            node_ranks=node_ranks(parsed["plan"]),
        )
        for part in ("data", "precision", "timing"):
            notes += parsed[part].without_effect()
        return CommandLine(Config(**parsed), notes, stages)


def _typed(
    parser: argparse.ArgumentParser, groups: Mapping[str, type[Options]], argv: Sequence[str]
) -> tuple[Provided, Any]:
    """Return what was typed, and the `Translation` of flags which are not current ones.

    It is made, and None otherwise, if current flags alone do not explain `argv`. Raises UsageError.
    """
    with suppress(UsageError):
        provided = Provided(groups, *parse_known(parser, groups, argv))
        provided.check_refused()
        return provided, None
    from megatron_zpp.config.legacy.translate import Translation

    others = Translation(parser, (*groups,), argv)
    return Provided(groups, others.typed, others.unknown), others


def _drop_loss_scale(provided: Provided) -> tuple[str, ...]:
    """Drop a --loss-scale beside --bf16, whose gradients need none, and return a note on it."""
    scale = provided.get("precision.loss_scale")
    if scale is None or not provided.get("precision.bf16"):
        return ()
    provided.drop("precision.loss_scale")
    return (f"--loss-scale {scale:g}: no effect: the run computes in bf16",)


_VOCAB_SIZE = "tokenizer.vocab_size"


def _drop_vocab_size(provided: Provided, *, padded: bool) -> tuple[str, ...]:
    """Drop a --vocab-size beside a tokenizer that has files, as Megatron-LM does, and return a note on it.

    Raises ValueError if it is there the size of the model, which is not `padded`.
    """
    flag, kind, size = "--vocab-size", resolved_type(provided.values["tokenizer"]), provided.get(_VOCAB_SIZE)
    if size is None or kind in (None, "NullTokenizer"):
        return ()
    if not padded:
        fix = f"is the model's size beside --no-pad-vocab-size; use --padded-vocab-size {size}"
        raise option_error(flag, size, fix)
    provided.drop(_VOCAB_SIZE)
    return (f"{flag} {size}: no effect: the vocabulary is that of the {kind}",)
