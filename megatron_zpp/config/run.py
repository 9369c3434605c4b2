"""Length of a run, evaluation, checkpoints, logging, timing, and process groups."""

import os
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Literal

from megatron_zpp.config.options import AUTO, Options, count, option, optional, switch
from megatron_zpp.config.values.urls import check_location, local_path

_LONGEST = 2**40  # steps or samples; a product with a batch size fits an int64
_LARGEST_BATCH = 2**22
_LONGEST_WAIT = 30 * 24 * 60  # minutes; timers of the collective libraries overflow with more
_SAVE, _LOAD, _WANDB = "--save DIRECTORY", "--load DIRECTORY", "--wandb-project NAME"
HUGGINGFACE = "hf:"  # prefix of a --load that names a directory in Hugging Face's format


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """training: batch and length"""

    micro_batch_size: int = count(
        None,
        "Samples per forward and backward on one rank; required. auto: the size that the plan finds fastest "
        "in the memory of these ranks; needs --global-batch-size, which it does not change.",
        auto=True,
        at_most=_LARGEST_BATCH,
    )
    global_batch_size: int | None = count(
        None, "Samples per optimizer step; default --micro-batch-size × ranks.", at_most=_LARGEST_BATCH
    )
    rampup_batch_size: tuple[int, int, int] | None = count(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START to --global-batch-size in steps of "
        "INCREMENT over the first SAMPLES samples.",
        needs="--train-samples N and --global-batch-size N",
        at_most=_LONGEST,
    )
    train_iters: int | None = count(None, "Length of the run in optimizer steps.", at_most=_LONGEST)
    train_samples: int | None = count(
        None, "Length of the run in samples, instead of --train-iters.", at_most=_LONGEST
    )
    train_tokens: int | None = count(
        None,
        "End the run with the step that reaches this many tokens, if the other length has not ended it.",
        needs="--train-samples N or --train-iters N",
        at_most=_LONGEST**2,
    )
    seed: int = option(1234, "Seed of initial weights, data order and dropout.", at_least=0, below=2**63)
    deterministic_mode: bool = switch(
        "Sum in a fixed order on GPUs too, so that equal runs on equal ranks have equal bits. Slower."
    )
    calculate_per_token_loss: bool = switch(
        "Loss and gradient are means over all tokens of a global batch that count, not means over "
        "micro-batches of means over tokens. Differs with --eod-mask-loss and best-fit packing."
    )
    z_loss_coeff: float = option(
        0.0,
        "Coefficient of the z-loss, the mean of log² of the softmax's denominators (PaLM: 1e-4, OLMo 2: "
        "1e-5). It is trained and logged beside the lm loss, not in it.",
        at_least=0,
        at_most=0.01,
    )
    exit_interval: int | None = count(None, "Save and exit at the next iteration that is a multiple of this.")
    exit_duration_in_mins: float | None = optional(
        "Save and exit when this process has run for this many minutes.", above=0
    )

    def check(self) -> None:
        """Require exactly one length."""
        if self.micro_batch_size is None:
            raise self.error("micro_batch_size", "give the samples per forward on one rank")
        if self.micro_batch_size == AUTO and self.global_batch_size is None:
            raise self.error("global_batch_size", f"give it with --micro-batch-size {AUTO}, which divides it")
        if (self.train_iters is None) == (self.train_samples is None):
            raise self.error("train_iters", "give exactly one of --train-iters and --train-samples")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Options):
    """evaluation: loss and perplexity on held-out tokens"""

    eval_iters: int = option(100, "Global batches per evaluation; 0: no evaluation.", at_least=0)
    eval_interval: int = count(1000, "Iterations between evaluations.")
    full_validation: bool = switch(
        "Evaluate every window of the validation data once, instead of --eval-iters batches."
    )

    sample_prompt: tuple[str, ...] | None = optional(
        "At every evaluation, let the model continue each of these texts by 64 tokens, and log them."
    )

    def check(self) -> None:
        """Refuse a prompt without evaluations."""
        if self.sample_prompt is not None and not self.enabled:
            raise self.error("sample_prompt", "needs evaluations; --eval-iters is 0")

    @property
    def enabled(self) -> bool:
        return self.full_validation or self.eval_iters > 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """checkpoint: what is saved and what a run starts from"""

    save: str | None = optional(
        "Write checkpoints to this directory, or to s3://BUCKET/PREFIX.", metavar="DIR"
    )
    save_interval: int | None = count(
        None, "Iterations between checkpoints; the end of the run always writes one.", needs=_SAVE
    )
    save_optim: bool = option(
        True,
        "Save weights without the optimizer's state: a third of the size; cannot resume as it was.",
        needs=_SAVE,
    )
    async_save: bool = switch(
        "Write checkpoints in the background. Costs CPU memory for a copy of the states for the whole run.",
        needs=_SAVE,
    )
    keep_last: int | None = count(
        None,
        "Keep this many of the newest checkpoints; remove older ones once the newest has been read back, "
        "beside the training.",
        needs=_SAVE,
    )
    keep_every: int | None = count(
        None, "Also keep iterations that are a multiple of this.", needs="--keep-last K"
    )
    load: str | None = optional(
        "Resume from the newest checkpoint in this directory or s3://BUCKET/PREFIX. If it is also --save and "
        "still empty, start from the beginning. hf:DIR or hf:ORG/NAME[@REVISION]: start at iteration 0 with "
        "the shape, weights and tokenizer of a Hugging Face model, in a directory or on the hub.",
        metavar="DIR",
    )
    ckpt_step: int | None = optional("Load this iteration instead of the newest.", needs=_LOAD, at_least=0)
    load_optim: bool = option(
        True,
        "Load weights and progress without the optimizer's state. The learning rate continues its schedule; "
        "--finetune restarts schedule and iteration.",
        needs=_LOAD,
    )
    use_checkpoint_args: bool = switch(
        "Take the model's shape from the checkpoint of --load, and the tokenizer where no --tokenizer-type "
        "is given. Without a checkpoint, flags give both.",
        needs=_LOAD,
    )
    use_checkpoint_opt_param_scheduler: bool = switch(
        "Take the learning rate, its schedule and the weight decay from the checkpoint of --load, in place "
        "of flags.",
        needs=_LOAD,
    )
    finetune: bool = switch("Load weights only, and start at iteration 0.", needs=_LOAD)
    exit_on_missing_checkpoint: bool = switch(
        "Exit with an error if --load holds no checkpoint, instead of starting from the beginning.",
        needs=_LOAD,
    )

    @property
    def huggingface(self) -> str | None:
        """DIR of --load hf:DIR, or ORG/NAME; None for other values."""
        if self.load is None or not self.load.startswith(HUGGINGFACE):
            return None
        return self.load.removeprefix(HUGGINGFACE)

    @property
    def saves_where_it_loads(self) -> bool:
        """Whether --save and --load name one directory, however they spell it."""
        if self.save is None or self.load is None:
            return False
        return os.path.realpath(self.save) == os.path.realpath(self.load)

    def check(self) -> None:
        """Require usable places, and refuse flags of iterations with --load hf:DIR, which has none."""
        if self.save is not None and self.save.startswith(HUGGINGFACE):
            tool = "megatron-zpp export"
            raise self.error("save", f"name a directory without {HUGGINGFACE}, and use {tool}")
        for flag, name in (("--save", self.save), ("--load", self.load)):
            if name is not None and not name.startswith(HUGGINGFACE):
                check_location(flag, name)
        if self.huggingface == "":
            raise self.error("load", "names no directory; give one after the colon")
        if self.huggingface:
            for name, fix in (
                ("use_checkpoint_args", "has no arguments, and gives the model's shape itself; omit it"),
                ("use_checkpoint_opt_param_scheduler", "has no schedule; omit it"),
                ("ckpt_step", "has no iterations; omit it"),
            ):
                if getattr(self, name) not in (None, False):
                    raise self.error(name, f"--load {self.load} {fix}")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Options):
    """logging: where metrics are written"""

    log_interval: int = count(100, "Iterations between log lines.")
    metrics_file: str | None = optional("Append one JSON object per logged step to this file.")
    tensorboard_dir: str | None = optional("Write TensorBoard events to this directory.")
    wandb_project: str | None = optional("Report to this Weights & Biases project.")
    wandb_exp_name: str | None = optional("Weights & Biases: the run's name.", needs=_WANDB)
    wandb_entity: str | None = optional("Weights & Biases: user or team.", needs=_WANDB)
    wandb_save_dir: str | None = optional("Weights & Biases: directory of local files.", needs=_WANDB)
    log_params_norm: bool = switch("Log the L2 norm of all weights.")

    def check(self) -> None:
        """Refuse a URL for the metrics."""
        if self.metrics_file is not None:
            local_path("--metrics-file", self.metrics_file)


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Options):
    """timing: how long the parts of a step take"""

    timing_log_level: Literal["0", "1", "2"] = option(
        "0",
        "1: log the time of each part of a step in ms, the minimum and maximum over ranks; 2: also of "
        "their parts. 0: off.",
    )
    log_straggler: bool = switch(
        "Log the time that each rank was busy, without waits for other ranks, and name the slowest."
    )
    profile: bool = switch(
        "Record a trace of some steps, for ui.perfetto.dev, in profile, below --tensorboard-dir if given."
    )
    profile_step_start: int = count(10, "First step of the trace of --profile.")
    profile_step_end: int = count(12, "Step after the last one of the trace of --profile.")
    profile_ranks: tuple[int, ...] = option((0,), "Ranks that record a trace each.", at_least=0)

    def without_effect(self) -> tuple[str, ...]:
        """Notes on flags that trace nothing. They change no result, and so never stop a run."""
        start, end, defaults = self.profile_step_start, self.profile_step_end, TimingConfig()
        if self.profile:
            empty = f"--profile-step-end {end}: no effect: no step is from {start} to before {end}"
            return (empty,) if end <= start else ()
        given = (field.name for field in fields(self) if field.name.startswith("profile_"))
        without = (name for name in given if getattr(self, name) != getattr(defaults, name))
        return tuple(str(self.error(name, "no effect: there is no --profile")) for name in without)

    def missing_ranks(self, ranks: int) -> tuple[str, ...]:
        """The same on ranks that a run of so many `ranks` does not have."""
        if not self.profile or max(self.profile_ranks, default=0) < ranks:
            return ()
        there = f"this run has ranks 0 to {ranks - 1}, and traces those alone"
        return (str(self.error("profile_ranks", there)),)

    @property
    def level(self) -> int:
        """--timing-log-level as a number; 2 with --log-straggler, which needs the finer parts."""
        return 2 if self.log_straggler else int(self.timing_log_level)


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Options):
    """distributed: devices and process groups; ranks come from the launcher"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: GPUs if there are any, else CPUs.")
    tensor_model_parallel_size: int = count(
        1,
        "Ranks of a node that share every layer, each with some of its heads, columns and vocabulary; "
        "between linear maps each has 1 / N of the tokens (sequence parallelism).",
        at_most=1024,
    )
    context_parallel_size: int = count(
        1,
        "Ranks of a node that share every sample, each with 1 / N of its tokens: for samples too long for "
        "one rank. Model states are sharded over them as over data ranks.",
        at_most=1024,
    )
    cp_comm_type: Literal["auto", "a2a", "p2p"] = option(
        "auto",
        "How context ranks exchange what attention needs. a2a: queries, keys and values of some heads; p2p: "
        "keys and values, around a ring; auto: a2a where N divides the heads of a rank.",
    )
    distributed_timeout_minutes: float = option(
        10,
        "Minutes for ranks to start, and after which an unfinished collective is an error; missing ranks are "
        "named every 10 seconds.",
        above=0,
        at_most=_LONGEST_WAIT,
    )
    heartbeat_timeout: float = option(
        60,
        "Seconds after which a silent or stuck rank ends the run. Once others were told to stop, a silent "
        "rank has 4 seconds. 0: no heartbeat.",
        at_least=0,
    )
    require_kernels: bool = switch(
        "Exit with an error if the compiled kernels are missing, instead of using plain torch, slowly."
    )

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=self.distributed_timeout_minutes)

    def check(self) -> None:
        """Refuse a heartbeat time-out that collectives would pre-empt."""
        if self.heartbeat_timeout >= self.timeout.total_seconds():
            raise self.error(
                "heartbeat_timeout",
                f"must be below --distributed-timeout-minutes {self.distributed_timeout_minutes}, "
                f"{self.timeout.total_seconds():g} s",
            )
