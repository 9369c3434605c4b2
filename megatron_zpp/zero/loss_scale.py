"""The factor that keeps fp16 gradients representable (Mixed Precision Training, section 3.2)."""

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import PrecisionConfig


class LossScale:
    """A fixed or dynamic loss scale with Megatron-LM's window and hysteresis, held on the device.

    Dynamic: from the `hysteresis`-th overflow on, each overflow halves the scale, down to the minimum. A
    window of steps without overflow doubles it and resets the count. Nothing here waits for the device.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        fixed = config.loss_scale if config.fp16 else 1.0
        self.dynamic = fixed is None
        self._minimum, self._window = config.min_loss_scale, config.loss_scale_window
        self._hysteresis = config.hysteresis
        self.scale = torch.tensor(config.initial_loss_scale if self.dynamic else fixed, device=device)
        self._clean_steps = torch.zeros((), device=device)
        self._patience = torch.full((), float(config.hysteresis), device=device)

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale after a step; `found_inf` is 1 for an overflow, else 0."""
        if not self.dynamic:
            return
        overflow = found_inf > 0
        self._patience = torch.where(overflow, self._patience - 1, self._patience)
        self._clean_steps = torch.where(overflow, torch.zeros_like(found_inf), self._clean_steps + 1)
        halve = overflow & (self._patience <= 0)
        double = self._clean_steps == self._window
        halved = torch.clamp(self.scale / 2, min=self._minimum)
        self.scale = torch.where(halve, halved, torch.where(double, self.scale * 2, self.scale))
        self._patience = torch.where(double, torch.full_like(found_inf, self._hysteresis), self._patience)
        self._clean_steps = torch.where(double, torch.zeros_like(found_inf), self._clean_steps)

    def is_lowest(self, scale: Tensor) -> Tensor:
        """1 if an overflow cannot lower `scale`, which is fixed or at the minimum; else 0."""
        return (scale <= self._minimum).float() if self.dynamic else torch.ones_like(scale)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint. Waits for the device."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale.item(),
            "clean_steps": self._clean_steps.item(),
            "patience": self._patience.item(),
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from `state` if both scales are dynamic, else from what the command line says."""
        if self.dynamic and state.get("dynamic", True):
            self.scale.fill_(state["scale"])
            self._clean_steps.fill_(state["clean_steps"])
            self._patience.fill_(state["patience"])
