"""Plain PyTorch behind the calls of our engine that a pair of runs makes."""

from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.contest.protocol import compile_plain, our_name, plain_adamw, set_learning_rate
from benchmarks.plain_models import PlainGPT
from megatron_zpp.config.root import Config
from megatron_zpp.model.gpt import GPT


class PlainEngine:
    """fp32 weights, autocast to bf16, a graph per layer, AdamW, clipping; the engine's first weights."""

    def __init__(self, config: Config, vocabulary: int, device: torch.device, *, compiled: bool) -> None:
        self.device, self._clip, self._bf16 = device, config.optimizer.clip_grad, config.precision.bf16
        with device:
            ours = GPT(config.model, vocabulary).initialize(config.training.seed)
            self._model = PlainGPT(config.model, vocabulary)
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(ours.get_parameter(our_name(name)))
        self._adamw = plain_adamw(self._model, device.type == "cuda", config.optimizer)
        if compiled:
            compile_plain(self._model)

    def accumulate(self, batch: Tensor, *, index: int, micro_batches: int) -> Tensor:
        """Forward and backward of (B, T + 1) tokens; their mean loss ()."""
        loss = self._loss(batch)
        (loss / micro_batches).backward()
        return loss.detach()

    def step(self, learning_rate: float) -> SimpleNamespace:
        """Clip and step."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        set_learning_rate(self._adamw, learning_rate)
        self._adamw.step()
        self._adamw.zero_grad()
        return SimpleNamespace(skipped=False)

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        """The mean loss of (B, T + 1) tokens."""
        return self._loss(batch)

    def close(self) -> None:
        """Nothing is open."""

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            return self._model(batch[:, :-1], batch[:, 1:])
