"""How long a run lasts, when it looks at itself, what it saves and where it reports."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error

_LONGEST = 2**40  # steps or samples; any product with a batch still is an int64's
_LARGEST_BATCH = 2**22
_LONGEST_WAIT = 30 * 24 * 60  # minutes; timers of the collective libraries overflow beyond
HUGGINGFACE = "hf:"  # begins a --load that names a directory of Hugging Face's


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """training: batch and length"""

    micro_batch_size: int = option(
        None, "Samples of one forward and backward on one rank.", at_least=1, at_most=_LARGEST_BATCH
    )
    global_batch_size: int | None = option(
        None,
        "Samples of one optimizer step; default --micro-batch-size × ranks.",
        at_least=1,
        at_most=_LARGEST_BATCH,
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over so many samples.",
        at_least=1,
        at_most=_LONGEST,
    )
    train_iters: int | None = option(None, "Optimizer steps of the run.", at_least=1, at_most=_LONGEST)
    train_samples: int | None = option(
        None, "Samples of the run, instead of --train-iters.", at_least=1, at_most=_LONGEST
    )
    seed: int = option(1234, "Decides initial weights, data order and dropout.", at_least=0, below=2**63)
    exit_interval: int | None = option(
        None, "Save and exit when the iteration is a multiple of this.", at_least=1
    )
    exit_duration_in_mins: float | None = option(
        None, "Save and exit after so many minutes of this process.", above=0
    )
    max_nan_iterations: int = option(
        10, "Save and exit when so many steps in a row had NaN or Inf in loss or gradients.", at_least=1
    )

    def check(self) -> None:
        """A length in iterations or in samples; a ramp needs samples, since its steps differ in size."""
        if self.micro_batch_size is None:
            raise option_error(
                "--micro-batch-size", "(not given)", "give the samples of one forward on one rank"
            )
        if (self.train_iters is None) == (self.train_samples is None):
            shown = "(not given)" if self.train_iters is None else self.train_iters
            raise option_error(
                "--train-iters", shown, "give exactly one of --train-iters and --train-samples"
            )
        if self.rampup_batch_size and self.train_samples is None:
            raise option_error("--rampup-batch-size", self.rampup_batch_size, "needs --train-samples")
        if self.rampup_batch_size and self.global_batch_size is None:
            raise option_error(
                "--rampup-batch-size", self.rampup_batch_size, "needs --global-batch-size as its end"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Options):
    """evaluation: loss and perplexity on held-out tokens"""

    eval_iters: int = option(100, "Global batches of one evaluation; 0 evaluates nothing.", at_least=0)
    eval_interval: int = option(1000, "Iterations between evaluations.", at_least=1)
    full_validation: bool = option(False, "Evaluate each held-out window once instead of --eval-iters.")

    sample_prompt: str | None = option(
        None, "Let the model go on from this text at every evaluation, and log what it writes."
    )
    sample_tokens: int = option(64, "Tokens that it writes; each is a forward.", at_least=1)

    def check(self) -> None:
        """A length needs a text, and a text an evaluation."""
        if self.sample_prompt is None and self.sample_tokens != 64:
            raise option_error("--sample-tokens", self.sample_tokens, "needs --sample-prompt TEXT")
        if self.sample_prompt is not None and not self.enabled:
            raise option_error("--sample-prompt", self.sample_prompt, "needs evaluations; --eval-iters is 0")

    @property
    def enabled(self) -> bool:
        """Whether the run reads held-out data at all."""
        return self.full_validation or self.eval_iters > 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """checkpoint: what is saved and what a run starts from"""

    save: str | None = option(None, "Directory of checkpoints to write.", metavar="DIR")
    save_interval: int | None = option(
        None, "Iterations between checkpoints; one is always written at the end.", at_least=1
    )
    save_optim: bool = option(True, "Write weights only.")
    async_save: bool = option(
        False, "Write behind the training, from a copy of the states in CPU memory that is held for it."
    )
    keep_last: int | None = option(
        None, "Remove all but so many newest checkpoints, once the newest is read back.", at_least=1
    )
    keep_every: int | None = option(
        None, "With --keep-last: also keep those of iterations that are a multiple of this.", at_least=1
    )
    load: str | None = option(
        None,
        "Directory to go on from. Equal to --save and still empty: start from the beginning. hf:DIR: the "
        "weights of a GPT-2 in Hugging Face's format, at iteration 0.",
        metavar="DIR",
    )
    ckpt_step: int | None = option(None, "Load this iteration instead of the latest.", at_least=1)
    load_optim: bool = option(True, "Load weights and position, not the optimizer's state.")
    finetune: bool = option(False, "Load weights only and start at iteration 0.")
    exit_on_missing_checkpoint: bool = option(
        False, "Refuse to start from the beginning when --load holds no checkpoint."
    )

    @property
    def huggingface(self) -> str | None:
        """The directory that --load hf:DIR names."""
        if self.load is None or not self.load.startswith(HUGGINGFACE):
            return None
        return self.load.removeprefix(HUGGINGFACE)

    def check(self) -> None:
        """Saving needs a place to save to, loading a place to load from."""
        if self.save is not None and self.save.startswith(HUGGINGFACE):
            tool = "python -m megatron_zpp.commands.huggingface export"
            raise option_error("--save", self.save, f"name a directory without {HUGGINGFACE}, and use {tool}")
        if self.huggingface == "":
            raise option_error("--load", self.load, "names no directory; give one behind the colon")
        if self.huggingface and self.ckpt_step:
            raise option_error(
                "--ckpt-step", self.ckpt_step, f"--load {self.load} has no iterations; leave it out"
            )
        if self.save is None:
            for given, flag in (
                (self.save_interval, "--save-interval"),
                (not self.save_optim, "--no-save-optim"),
                (self.async_save, "--async-save"),
                (self.keep_last, "--keep-last"),
            ):
                if given:
                    raise option_error(flag, "(given)" if given is True else given, "needs --save DIRECTORY")
        if self.keep_every and not self.keep_last:
            raise option_error(
                "--keep-every", self.keep_every, "needs --keep-last K; without it all are kept"
            )
        if self.load is None:
            needs_load = {
                "--ckpt-step": self.ckpt_step,
                "--no-load-optim": not self.load_optim,
                "--finetune": self.finetune,
                "--exit-on-missing-checkpoint": self.exit_on_missing_checkpoint,
            }
            for flag, value in needs_load.items():
                if value:
                    raise option_error(flag, "(given)" if value is True else value, "needs --load DIRECTORY")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Options):
    """logging: where the numbers of a run go"""

    log_interval: int = option(100, "Iterations between log lines.", at_least=1)
    metrics_file: str | None = option(None, "Append one JSON object a logged step to this file.")
    tensorboard_dir: str | None = option(None, "Write TensorBoard events to this directory.")
    wandb_project: str | None = option(None, "Report to this Weights & Biases project.")
    wandb_exp_name: str | None = option(None, "Weights & Biases: the run's name.")
    wandb_entity: str | None = option(None, "Weights & Biases: user or team.")
    wandb_save_dir: str | None = option(None, "Weights & Biases: directory of local files.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None, "Weights & Biases: overrides WANDB_MODE."
    )
    device_peak_tflops: float | None = option(
        None, "Peak of one device for the model FLOPs utilisation; known for common GPUs.", above=0
    )
    debug: bool = option(False, "Show tracebacks.")

    def check(self) -> None:
        """The other W&B flags mean nothing without a project."""
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir", "wandb_mode"):
            if getattr(self, name) is not None and self.wandb_project is None:
                flag = "--" + name.replace("_", "-")
                raise option_error(flag, getattr(self, name), "needs --wandb-project NAME")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Options):
    """distributed: devices and process groups; ranks come from the launcher"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: GPUs when there are any.")
    distributed_backend: Literal["nccl", "gloo"] | None = option(
        None, "Collective library; default nccl on GPUs, gloo on CPUs."
    )
    distributed_timeout_minutes: float = option(
        10, "Minutes after which a collective that does not end is an error.", above=0, at_most=_LONGEST_WAIT
    )
    heartbeat_timeout: float = option(
        60,
        "Seconds after which a rank that is silent or stuck ends the run; 4 for a silent one if others were "
        "told to stop; 0 watches nobody.",
        at_least=0,
    )
    preflight_timeout: float = option(
        180,
        "Seconds that ranks have to meet, to join and to try the network; who is missing is said every 10.",
        above=0,
    )
    require_kernels: bool = option(
        False, "Refuse to run without the compiled kernels; else plain torch serves, more slowly."
    )

    @property
    def timeout(self) -> timedelta:
        """--distributed-timeout-minutes."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def check(self) -> None:
        """NCCL moves GPU memory only; the heartbeat is there to know first."""
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise option_error("--distributed-backend", "nccl", "needs GPUs; --device cpu works with gloo")
        if self.heartbeat_timeout >= self.timeout.total_seconds():
            raise option_error(
                "--heartbeat-timeout",
                self.heartbeat_timeout,
                f"must be below --distributed-timeout-minutes {self.distributed_timeout_minutes}, "
                f"{self.timeout.total_seconds():g} s",
            )
