"""The learning rate as a function of samples, with Megatron-LM's shapes."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.config.options import accepted, choices, option_error


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Warm-up from `initial` to `peak` over `warmup` samples, then decay to `floor` at `decay` samples.

    `style` WSD (warm-up, stable, decay) holds the peak until the last `wsd_decay` samples.
    Call it with the samples of the steps before that changed the weights: see RunSchedule.learning_rate_at.
    Lengths may be in steps as well, if it is called with steps.
    """

    peak: float
    decay: int
    warmup: float = 0
    floor: float = 0.0
    initial: float = 0.0
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    wsd_decay: int = 0
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"

    def __post_init__(self) -> None:
        """Raise ValueError for what would otherwise show after the warm-up, or as a jump of the rate."""
        for name in ("style", "wsd_style"):
            hint = self.__dataclass_fields__[name].type
            if getattr(self, name) not in choices(hint):
                raise option_error(name, getattr(self, name), f"must be {accepted(hint)}")
        if self.style != "constant" and self.warmup >= self.decay:
            raise option_error("warmup", self.warmup, f"must end before the decay does, at {self.decay}")
        if self.style == "WSD" and self.wsd_decay > self.decay - self.warmup:
            room = f"must fit between warm-up and end of decay, into {self.decay - self.warmup:g}"
            raise option_error("wsd_decay", self.wsd_decay, room)

    def decoupled(self, config: LearningRateConfig) -> "LearningRate | None":
        """Return the rate of embedding and output layer; None without --decoupled-lr."""
        if config.decoupled_lr is None:
            return None
        floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        return replace(self, peak=config.decoupled_lr, floor=floor)

    @classmethod
    def from_config(
        cls, config: LearningRateConfig, *, samples: int, samples_per_iteration: int
    ) -> "LearningRate":
        """Convert lengths in iterations to samples; by default the decay ends with the run.

        Raises ValueError if the warm-up or the final decay does not fit into the decay length.
        """

        def in_samples(iterations: int | None, own: int | None) -> int | None:
            return own if iterations is None else iterations * samples_per_iteration

        def length_error(prefix: str, problem: str, length: float) -> Exception:
            flag, value = _given(config, prefix)
            limit = f"{length:g} samples"
            if flag.endswith("-iters"):  # in the unit of the value
                limit = f"{length / samples_per_iteration:g} iterations of {samples_per_iteration} samples"
            return option_error(flag, value, f"{problem} {limit}")

        decay = in_samples(config.lr_decay_iters, config.lr_decay_samples) or samples
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay  # as in Megatron-LM not whole samples
        else:
            warmup = config.lr_warmup_samples or config.lr_warmup_iters * samples_per_iteration
        wsd_decay = in_samples(config.lr_wsd_decay_iters, config.lr_wsd_decay_samples) or 0
        if config.lr_decay_style != "constant" and warmup >= decay:
            raise length_error("lr_warmup", "must end before the decay does, at", decay)
        room = max(0, decay - warmup)
        if wsd_decay > room:
            raise length_error("lr_wsd_decay", "must fit between warm-up and end of decay, into", room)
        return cls(
            peak=config.lr,
            floor=config.min_lr,
            initial=config.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=config.lr_decay_style,
            wsd_decay=wsd_decay,
            wsd_style=config.lr_wsd_decay_style,
        )

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that comes after `samples`."""
        if self.warmup and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.floor
        if self.style == "inverse-square-root":
            ratio = math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1))
            return max(self.floor, self.peak * ratio)
        return self.floor + self._share(samples) * (self.peak - self.floor)

    def _share(self, samples: int) -> float:
        """The decayed share of the distance from floor to peak, from 1 down to 0."""
        if self.style == "WSD":
            start = self.decay - self.wsd_decay
            if samples <= start:
                return 1.0
            return _falling(self.wsd_style, (samples - start) / self.wsd_decay)
        return _falling(self.style, (samples - self.warmup) / (self.decay - self.warmup))


def _falling(style: str, done: float) -> float:
    """A curve from 1 at `done` 0 to 0 at `done` 1."""
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(done)


def _given(config: LearningRateConfig, prefix: str) -> tuple[str, float]:
    """The flag that set a length, and its value."""
    names = (f"{prefix}_fraction", f"{prefix}_iters", f"{prefix}_samples")
    name = next(name for name in names if getattr(config, name, None))
    return "--" + name.replace("_", "-"), getattr(config, name)
