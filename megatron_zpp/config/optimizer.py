"""How a step changes the weights: AdamW, the learning-rate schedule, and number formats."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, count, flag_name, option, option_error, optional, switch
from megatron_zpp.config.words import counted
from megatron_zpp.config.zero import ZeroConfig

_COEFFICIENTS = "--muon-coefficient-type"
_NS_STEPS = {"simple": 1, "quintic": 5, "polar_express": 1, "aol": 4}  # multiples of these have coefficients
_WSD, _MUON = "--lr-decay-style WSD", "--optimizer muon"
# The smallest hidden size of a measured step with --fp8, and how many times as fast as bf16's that step was:
# tensorwise in benchmarks/results/throughput_fp8.json, with 8-bit weights in throughput_fp8_1.3b.json.
_FP8_PAYS, _FP8_SPEEDS = 2048, "1.09 to 1.34"
# Bytes per element of the tensors that hold a moment: its numbers, and the scales of blocks.
_FORM_BYTES = {"fp32": (4,), "bf16": (2,), "fp16": (2, 1 / 128), "fp8": (1, 1 / 128)}
_PRECISION_AWARE = "--use-precision-aware-optimizer"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """optimizer: AdamW or Muon, and clipping"""

    optimizer: Literal["adam", "muon"] = option(
        "adam",
        "adam: AdamW. muon: Muon for the matrices of layers, AdamW for embeddings, output layer, norms and "
        "biases, whose learning rate is --decoupled-lr if that is given.",
    )
    muon_momentum: float = option(0.9, "Decay of the average of gradients.", needs=_MUON, at_least=0, below=1)
    muon_nesterov: bool = switch(
        "Average the newest gradient once more, as Nesterov's momentum does.", needs=_MUON
    )
    muon_no_split_qkv: bool = switch(
        "Take the weights of queries, keys and values as one matrix, not three.", needs=_MUON
    )
    muon_num_ns_steps: int = count(5, "Steps of Newton-Schulz.", needs=_MUON, at_most=100)
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "aol"] = option(
        "quintic", "Coefficients of these steps, as NVIDIA's Emerging-Optimizers name them.", needs=_MUON
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option(
        "spectral",
        "Factor of an update of R × C: spectral: √max(R, C); unit_rms_norm: √(R / C); shape_scaling: "
        "√max(1, R / C).",
        needs=_MUON,
    )
    muon_extra_scale_factor: float = option(
        1.0, "Another factor; 0.2 with spectral makes updates as large as AdamW's.", needs=_MUON, above=0
    )
    muon_row_scaling_beta2: float | None = optional(
        "NorMuon: divide each row of an update by its root mean square, averaged over steps with this decay; "
        "the norm of the update stays. 0.95 in its paper; default no scaling.",
        needs=_MUON,
        at_least=0,
        below=1,
    )
    weight_decay: float = option(
        0.01, "Decoupled weight decay of matrices; biases and norms are not decayed.", at_least=0
    )
    clip_grad: float = option(1.0, "Clip the global gradient norm to this; 0: no clipping.", at_least=0)
    adam_beta1: float = option(0.9, "Decay of the first moment.", at_least=0, below=1)
    adam_beta2: float = option(0.999, "Decay of the second moment.", at_least=0, below=1)
    adam_eps: float = option(1e-8, "Added to the square root of the second moment.", above=0)
    use_precision_aware_optimizer: bool = switch(
        "Let AdamW's states take fewer bytes than fp32, as the three flags below say."
    )
    main_params_dtype: Literal["fp32", "bf16+8"] = option(
        "fp32",
        "Master weights. bf16+8: the upper 24 bits of fp32, as the bf16 weights that compute and a byte "
        "beside each, rounded stochastically.",
        needs=_PRECISION_AWARE,
    )
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = option(
        "fp32",
        "First moment, rounded stochastically. fp8 and fp16: blocks of 128 elements with one scale. fp32 and "
        "bf16 also for Muon's momentum.",
        needs=_PRECISION_AWARE,
    )
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = option(
        "fp32",
        "Second moment, likewise. fp8 and fp16: the root of the moment.",
        needs=_PRECISION_AWARE,
    )
    optimizer_in_backward: bool = switch(
        "Step each unit when the backward has made its gradient, and free it: for one rank and one "
        "micro-batch per step. --clip-grad then takes the last step's norm, or that of the gradients so far "
        "if it is larger.",
        needs="--optimizer adam",
    )
    fused_backend: Literal["auto", "apex", "torch"] = option(
        "auto",
        "Source of norms and AdamW. apex: NVIDIA apex; torch: torch's norms with this program's "
        "AdamW kernel (torch's AdamW on CPUs and without a compiler); auto: apex on a GPU if it is "
        "installed and layers are not compiled, without --zero-offload-optimizer, --decoupled-lr, --use-mup, "
        "--optimizer-in-backward and --use-precision-aware-optimizer; else torch.",
    )

    def check(self) -> None:
        """Refuse steps without coefficients, and optimizers that a state's format or time does not fit."""
        kind = self.muon_coefficient_type
        if self.muon_num_ns_steps % _NS_STEPS[kind]:
            fix = f"must be a multiple of {_NS_STEPS[kind]} with {_COEFFICIENTS} {kind}"
            raise self.error("muon_num_ns_steps", fix)
        if self.optimizer == "muon" and self.exp_avg_dtype not in ("fp32", "bf16"):
            raise self.error("exp_avg_dtype", "must be fp32 or bf16 with --optimizer muon")
        if self.optimizer == "muon" and self.splits_weights:
            raise self.error("main_params_dtype", "needs --optimizer adam")

    @property
    def compact(self) -> bool:
        """Whether some states take fewer bytes than fp32."""
        forms = self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype
        return any(form != "fp32" for form in forms)

    def describe(self) -> str:
        """Return what is not AdamW on states in fp32, for the first lines of the log; empty if nothing is."""
        muon = ["Muon for layers' matrices, each as a whole, AdamW for the rest"]
        parts = muon if self.optimizer == "muon" else []
        if self.compact:
            forms = f"{self.exp_avg_dtype} and {self.exp_avg_sq_dtype}"
            parts.append(f"master weights in {self.main_params_dtype}, moments in {forms}")
        return "; ".join(parts)

    @property
    def forms_of_moments(self) -> dict[str, str]:
        """The formats of AdamW's moments that are not fp32, by the moments' names in checkpoints."""
        forms = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return {name: form for name, form in forms.items() if form != "fp32"}

    @property
    def saved_bytes(self) -> list[tuple[float, ...]]:
        """Bytes per element of the tensors of a checkpoint: of weights, first and second moments."""
        moments = self.exp_avg_dtype, self.exp_avg_sq_dtype
        return [(2, 1) if self.splits_weights else (4,), *(_FORM_BYTES[form] for form in moments)]

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments of an element, the scales of their blocks included."""
        return sum(map(sum, self.saved_bytes[1:]))

    @property
    def splits_weights(self) -> bool:
        """Whether master weights are the weights that compute, and a byte beside each."""
        return self.main_params_dtype != "fp32"

    def check_weights(self, zero: ZeroConfig, compute_dtype: str, *, coded: bool) -> None:
        """Raise ValueError for weights that the optimizer cannot step.

        --main-params-dtype needs ranks that hold bf16 weights as they compute. A step in the backward cannot
        wait for what is known only with all gradients. `coded`: weights are held as 8-bit codes.
        """
        offload, on_gpu = zero.zero_offload_optimizer, "steps on the GPU; omit --zero-offload-optimizer"
        split, whole = self.splits_weights, "needs the rank's own weights in bf16; omit"
        early = self.optimizer_in_backward
        scaled = "needs --bf16 or --fp32: a loss scale skips steps when units have taken them"
        wide = f"needs --bf16; this run computes in {compute_dtype}"
        unscaled = "has no scales of the whole step yet; omit --fp8-param-gather"
        for name, given, fix in (
            ("optimizer", self.optimizer == "muon" and offload, on_gpu),
            ("main_params_dtype", split and compute_dtype != "bfloat16", wide),
            ("main_params_dtype", split and offload, f"{whole} --zero-offload-optimizer"),
            ("main_params_dtype", split and zero.zero_quantized_weights, f"{whole} --zero-quantized-weights"),
            ("main_params_dtype", split and coded, f"{whole} --fp8-param-gather"),
            ("optimizer_in_backward", early and compute_dtype == "float16", scaled),
            ("optimizer_in_backward", early and offload, on_gpu),
            ("optimizer_in_backward", early and coded, unscaled),
        ):
            if given:
                raise self.error(name, fix)

    def check_batch(self, ranks: int, micro_batches: int) -> None:
        """Raise ValueError if gradients are sums over ranks or micro-batches, and units step as they come."""
        if self.optimizer_in_backward and (ranks, micro_batches) != (1, 1):
            fix = (
                "needs 1 rank and a --global-batch-size of 1 micro-batch; this run has "
                f"{counted(ranks, 'rank')} and {counted(micro_batches, 'micro-batch', 'micro-batches')}"
            )
            raise self.error("optimizer_in_backward", fix)


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig(Options):
    """learning rate: a schedule over samples"""

    lr: float = option(None, "Peak learning rate; required.", above=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", at_least=0)
    decoupled_lr: float | None = optional(
        "Peak learning rate of the token embedding and the output layer, or of all that AdamW trains beside "
        "Muon; default --lr.",
        above=0,
    )
    decoupled_min_lr: float | None = optional(
        "Their learning rate at the end of the decay; default --min-lr.", needs="--decoupled-lr", at_least=0
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear", "Shape of the decay after warm-up. WSD: warm-up, stable, decay."
    )
    lr_decay_iters: int | None = count(None, "Iterations until --min-lr is reached; default --train-iters.")
    lr_decay_samples: int | None = count(None, "Samples until --min-lr is reached; default --train-samples.")
    lr_warmup_fraction: float | None = optional(
        "Length of linear warm-up, as a share of the decay length.", at_least=0, at_most=1
    )
    lr_warmup_iters: int = option(0, "Length of linear warm-up in iterations.", at_least=0)
    lr_warmup_samples: int = option(0, "Length of linear warm-up in samples.", at_least=0)
    lr_warmup_init: float = option(0.0, "Learning rate at the start of warm-up.", at_least=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", "WSD: shape of the final decay."
    )
    lr_wsd_decay_iters: int | None = count(None, "WSD: length of the final decay in iterations.", needs=_WSD)
    lr_wsd_decay_samples: int | None = count(None, "WSD: length of the final decay in samples.", needs=_WSD)

    def check(self) -> None:
        """Refuse floors above the peak, and a length that is given twice."""
        if self.lr is None:
            raise self.error("lr", "give the peak learning rate, e.g. --lr 3e-4")
        self._check_floors("--lr", self.lr, "--min-lr", self.min_lr)
        if self.decoupled_lr is not None:
            floor = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
            self._check_floors("--decoupled-lr", self.decoupled_lr, "--decoupled-min-lr", floor)
        self.check_alternatives("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
        wsd_lengths = (self.lr_wsd_decay_iters, self.lr_wsd_decay_samples)
        if self.lr_decay_style == "WSD" and wsd_lengths.count(None) != 1:
            raise self.error("lr_decay_style", "needs one of --lr-wsd-decay-iters and --lr-wsd-decay-samples")

    def check_unit(self, own: str) -> None:
        """Raise ValueError unless the schedule is in the unit of the run: iters or samples."""
        other = "samples" if own == "iters" else "iters"
        for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
            if getattr(self, name):
                right = flag_name(name).replace(other, own)
                raise self.error(name, f"the run's length is given by --train-{own}; use {right}")

    def _check_floors(self, peak_flag: str, peak: float, floor_flag: str, floor: float) -> None:
        for flag, value in ((floor_flag, floor), ("--lr-warmup-init", self.lr_warmup_init)):
            if value > peak:
                raise option_error(flag, value, f"must be at most {peak_flag} {peak}")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Options):
    """precision: number formats of the compute"""

    bf16: bool = switch("Compute in bfloat16; the default on GPUs.")
    fp16: bool = switch("Compute in float16 with a loss scale.")
    fp32: bool = switch("Compute in float32; the default on CPUs.")
    fp8: bool = switch(
        "With --bf16: compute the matrix products of layers on 8-bit floats with one scale per tensor; "
        "weights, gradients and other activations keep their formats. GPUs need compute capability 8.9."
    )
    fp8_recipe: Literal["tensorwise", "delayed"] | None = optional(
        "Source of the scales of --fp8. tensorwise: the tensor itself, which is read twice; delayed: the "
        "largest magnitudes of earlier steps. Default tensorwise; delayed with a flag that only delayed has.",
        needs="--fp8",
    )
    fp8_amax_history_len: int | None = count(
        None, "delayed: steps whose largest magnitudes are kept; default 1.", needs="--fp8", at_most=4096
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] | None = optional(
        "delayed: scale by the last step's largest magnitude (default), or by the largest of all kept.",
        needs="--fp8",
    )
    fp8_param_gather: bool = switch(
        "delayed: hold, gather and multiply the weights of layers' linear maps as 8-bit codes of the fp32 "
        "master weights, which the optimizer writes once per step.",
        needs="--fp8",
    )
    fp8_output_layer: bool = switch(
        "delayed: compute the three products of the output layer with its loss on 8-bit floats too. Logits "
        "without a loss, as of samples, are 16-bit products.",
        needs="--fp8",
    )
    loss_scale: float | None = optional(
        "fp16: constant loss scale, independent of the number of ranks; default dynamic.",
        needs="--fp16",
        above=0,
    )
    initial_loss_scale: float = option(2.0**32, "fp16: initial dynamic loss scale.", above=0)
    min_loss_scale: float = option(1.0, "fp16: smallest dynamic loss scale.", above=0)
    loss_scale_window: float = option(
        1000, "fp16: steps without overflow after which the loss scale doubles.", at_least=1
    )
    grad_reduce_in_bf16: bool = switch(
        "Send all gradients between ranks in bfloat16. Otherwise accumulated gradients travel in float32, "
        "and gradients of a single micro-batch (stages 2 and 3) in the compute format."
    )
    hysteresis: int = count(2, "fp16: overflows before the loss scale halves.")

    def check(self) -> None:
        """Refuse more than one format, and flags of another recipe."""
        self.check_alternatives("bf16", "fp16", "fp32")
        if self.fp8 and (self.fp16 or self.fp32):
            raise self.error("fp8", f"needs --bf16, not --{'fp16' if self.fp16 else 'fp32'}")
        given = self._given_of_delayed()
        if self.fp8_recipe == "tensorwise" and given:
            raise self.error(given[0], "needs --fp8-recipe delayed")
        if self.loss_scale_window % 1:
            raise self.error("loss_scale_window", "must be a whole number of steps")
        object.__setattr__(self, "loss_scale_window", int(self.loss_scale_window))  # 500.0, as in Megatron-LM
        if self.min_loss_scale > self.initial_loss_scale:
            raise self.error(
                "min_loss_scale",
                f"must be at most --initial-loss-scale {self.initial_loss_scale}",
            )

    def without_effect(self) -> tuple[str, ...]:
        """Notes on flags of the loss scale, common in Megatron-LM's command lines, in a run that has none."""
        if self.fp16:
            return ()
        scale = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        given = (name for name in scale if getattr(self, name) != getattr(PrecisionConfig, name))
        return tuple(str(self.error(name, "no effect: there is no --fp16")) for name in given)

    @property
    def fp8_delayed(self) -> bool:
        """Whether 8-bit products take their scales from earlier steps."""
        return self.fp8_recipe == "delayed" or (self.fp8_recipe is None and bool(self._given_of_delayed()))

    def describe_products(self) -> str:
        """What a log line says after the compute format."""
        scaling = " and delayed scaling" if self.fp8_delayed else ""
        held = " of 8-bit weights" if self.fp8_param_gather else ""
        output = ", also of the output layer" if self.fp8_output_layer else ""
        return f" with 8-bit products{scaling}{held}{output}" if self.fp8 else ""

    def _given_of_delayed(self) -> list[str]:
        names = ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather", "fp8_output_layer")
        return [name for name in names if getattr(self, name)]

    def check_device(self, device: str, capability: tuple[int, int] | None) -> None:
        """Raise ValueError if --fp8 cannot be used; `capability`: the GPU's compute capability, if known."""
        if self.fp8 and self.compute_dtype(device) != "bfloat16":
            raise self.error("fp8", f"needs --bf16, which is not the default on the {device}")
        if self.fp8 and capability is not None and capability < (8, 9):
            has = ".".join(map(str, capability))
            raise self.error("fp8", f"needs a GPU of compute capability 8.9; this one has {has}")

    def speed_notes(self, hidden_size: int) -> list[str]:
        """A note on --fp8 if layers are smaller than all whose steps it was measured to make faster."""
        if not self.fp8 or hidden_size >= _FP8_PAYS:
            return []
        return [
            f"--fp8: hidden size {hidden_size} is below {_FP8_PAYS}, the smallest whose steps were measured "
            f"to be faster ({_FP8_SPEEDS} times as fast as bf16's, on an H200); --bf16 alone may be faster"
        ]

    def compute_dtype(self, device: str) -> str:
        """Return `float32`, `bfloat16` or `float16`: the requested format, else the device's default."""
        if self.fp16:
            return "float16"
        if self.bf16:
            return "bfloat16"
        return "float32" if self.fp32 or device == "cpu" else "bfloat16"
