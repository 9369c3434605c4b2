"""Plain PyTorch behind the calls of our engine that a pair of runs makes."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.contest.protocol import compile_plain, our_name, set_learning_rate
from benchmarks.plain_models import PlainGPT
from megatron_zpp.config.root import Config
from megatron_zpp.model.gpt import GPT


class Taken(NamedTuple):
    """What a step returns."""

    skipped: bool


class PlainEngine:
    """fp32 weights, autocast to bf16, a graph per layer, AdamW, clipping; the engine's first weights."""

    def __init__(self, config: Config, vocabulary: int, device: torch.device, *, compiled: bool) -> None:
        self.device, optimizer = device, config.optimizer
        with device:
            ours = GPT(config.model, vocabulary).initialize(config.training.seed)
            self._model = PlainGPT(config.model, vocabulary)
        self._model.load_state_dict(
            {name: ours.get_parameter(our_name(name)) for name in self._model.state_dict()}
        )
        kinds = [
            [each for each in self._model.parameters() if (each.ndim > 1) == wide] for wide in (True, False)
        ]
        groups = [
            {"params": kind, "weight_decay": decay}
            for kind, decay in zip(kinds, (optimizer.weight_decay, 0.0), strict=True)
        ]
        betas = optimizer.adam_beta1, optimizer.adam_beta2
        self._adamw = torch.optim.AdamW(
            groups, betas=betas, eps=optimizer.adam_eps, fused=device.type == "cuda" or None
        )
        self._clip, self._autocast = optimizer.clip_grad, config.precision.bf16
        if compiled:
            compile_plain(self._model)

    def accumulate(self, batch: Tensor, *, index: int, micro_batches: int) -> Tensor:
        """Forward and backward of (B, T + 1) tokens; their mean loss ()."""
        loss = self._loss(batch) / micro_batches
        loss.backward()
        return loss.detach()

    def step(self, learning_rate: float) -> Taken:
        """Clip and step."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        set_learning_rate(self._adamw, learning_rate)
        self._adamw.step()
        self._adamw.zero_grad()
        return Taken(skipped=False)

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        """The mean loss of (B, T + 1) tokens."""
        return self._loss(batch)

    def close(self) -> None:
        """Nothing is open."""

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self._model(batch[:, :-1], batch[:, 1:])
