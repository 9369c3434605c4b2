"""The factor that keeps fp16 gradients representable (Mixed Precision Training, section 3.2)."""

from dataclasses import dataclass

from megatron_zpp.config.optimizer import PrecisionConfig


@dataclass
class LossScale:
    """A fixed or dynamic loss scale with Megatron-LM's window and hysteresis.

    Dynamic: after `hysteresis` overflows every further one halves the scale, down to `minimum`;
    `window` clean steps in a row double it and renew the patience.
    """

    scale: float
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    clean_steps: int = 0
    patience: int = 2

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> "LossScale":
        """1 without fp16; fixed with --loss-scale; else dynamic."""
        if not config.fp16:
            return cls(scale=1.0)
        if config.loss_scale is not None:
            return cls(scale=config.loss_scale)
        return cls(
            scale=config.initial_loss_scale,
            dynamic=True,
            minimum=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            patience=config.hysteresis,
        )

    def update(self, overflow: bool) -> None:
        """Takes note of one step."""
        if not self.dynamic:
            return
        if overflow:
            self.clean_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.patience = self.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "patience": self.patience}

    def load_state(self, state: dict[str, float]) -> None:
        """Goes on from `state`; a fixed scale stays what the command line says."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self.clean_steps = int(state["clean_steps"])
            self.patience = int(state["patience"])
