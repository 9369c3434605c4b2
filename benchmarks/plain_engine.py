"""Plain PyTorch behind the calls of our engine that runs of benchmarks make."""

from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.contest.protocol import compile_plain, plain_adamw, set_learning_rate
from benchmarks.plain_models import PlainGPT, PlainLlama
from megatron_zpp.config.optimizer import OptimizerConfig


class PlainEngine:
    """fp32 weights, autocast to bf16, a graph per layer, AdamW, clipping."""

    def __init__(
        self, model: PlainGPT | PlainLlama, config: OptimizerConfig, *, bf16: bool, compiled: bool
    ) -> None:
        self.model, self.device, self._clip = model, model.norm.weight.device, config.clip_grad
        self._autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)
        self.adamw = plain_adamw(model, self.device.type == "cuda", config)
        if compiled:
            compile_plain(model)

    def accumulate(self, batch: Tensor, *, index: int, micro_batches: int) -> Tensor:
        """Forward and backward of (B, T + 1) tokens; their mean loss ()."""
        loss = self._loss(batch)
        (loss / micro_batches).backward()
        return loss.detach()

    def step(self, learning_rate: float) -> SimpleNamespace:
        """Clip and step; the norm of the gradient."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        set_learning_rate(self.adamw, learning_rate)
        self.adamw.step()
        self.adamw.zero_grad()
        return SimpleNamespace(skipped=False, norm=norm)

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        """The mean loss of (B, T + 1) tokens."""
        return self._loss(batch)

    def close(self) -> None:
        """Nothing is open."""

    def _loss(self, batch: Tensor) -> Tensor:
        with self._autocast:
            return self.model(batch[:, :-1], batch[:, 1:])
