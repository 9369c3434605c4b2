"""Trains one model as K nodes × L ranks would, in one process: the same codes, blocks and order of sums."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel, Graphed
from benchmarks.emulation.gradients import NodeSum, cross_node_sum
from benchmarks.emulation.islands import Islands, IslandSettings
from benchmarks.emulation.muon import Muon, MuonSettings
from benchmarks.emulation.rungs import MLP, TABLES, Rung, Travel
from benchmarks.emulation.source import Source
from benchmarks.emulation.text import Text
from benchmarks.emulation.weights import Difference, WeightExchanges
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import SQUARES_BLOCK, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.train.schedule.learning_rate import LearningRate

SHAPES = {  # layers, hidden size, heads, tokens of a sample, vocabulary; parameters by name
    "tiny": (2, 64, 2, 32, 256),
    "1m": (4, 128, 4, 64, 1024),
    "10m": (5, 384, 6, 256, 4096),
    "30m": (8, 512, 8, 256, 8192),
    "60m": (8, 768, 12, 256, 8192),
    "125m": (12, 768, 12, 512, 32768),
}
Format = TypeVar("Format")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all runs of a campaign have in common."""

    size: str = "10m"
    nodes: int = 2
    ranks_per_node: int = 2
    micro_batches: int = 1
    micro_batch_size: int = 4
    steps: int = 600
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_fraction: float = 0.1
    precision: str = "bf16"
    attention: str = "math"
    eval_samples: int = 512
    evaluations: int = 4  # in the last tenth of the steps: their mean is the final loss
    graphs: bool = False  # a forward and its backward are one CUDA graph
    text: Mapping[str, Any] | None = None  # Text.described, or the synthetic language
    adamw: Mapping[str, float] = field(default_factory=dict)  # AdamWSettings that are not the defaults
    muon: Mapping[str, Any] | None = None  # MuonSettings that are not the defaults; without it AdamW alone
    islands: Mapping[str, Any] | None = None  # IslandSettings that are not the defaults; None: one job

    @property
    def samples_per_step(self) -> int:
        """Over all ranks and micro-batches."""
        return self.nodes * self.ranks_per_node * self.micro_batches * self.micro_batch_size

    def model(self) -> tuple[ModelConfig, int]:
        """The shape, without dropout, and the size of the vocabulary."""
        layers, hidden, heads, tokens, vocab = SHAPES[self.size]
        if self.text is not None:
            vocab = self.text["vocabulary"]
        config = ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            seq_length=tokens,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        return config, vocab


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW and clipping, as the engine's OptimizerConfig."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


class EmulatedRanks:
    """The state of all ranks, which agree on all of it but the gradients: one copy serves them."""

    def __init__(
        self,
        flat: FlatModel,
        rung: Rung,
        *,
        nodes: int,
        ranks_per_node: int,
        operations: Operations,
        adamw: AdamWSettings,
        seed: int,
        muon: MuonSettings | None = None,
    ) -> None:
        """With `muon` AdamW has everything but the matrices inside layers."""
        self.flat, self._operations, self._adamw = flat, operations, adamw
        self._nodes, self._local = nodes, ranks_per_node
        self._weights = WeightExchanges(rung, operations, flat)
        self._exchanges = [
            (here, self._weights.of(format, here)) for format, here in _joined(flat.kinds, rung.weights_of)
        ]
        sums = _joined(flat.kinds, rung.travel_of)
        plain = Travel("plain", "plain", 0.0)  # of one node, which has no hop 2
        self._sums = [
            (
                here,
                cross_node_sum(
                    travel if nodes > 1 else plain,
                    rung,
                    operations,
                    flat,
                    here,
                    seed,
                    muon.momentum if muon else adamw.beta1,
                ),
            )
            for travel, here in sums
        ]
        coded = [here for travel, here in sums if travel.gradients not in ("plain", "bf16")]
        hop1 = None if rung.hop1 == "plain" else QuantFormat(rung.hop1, rung.hop1_block)
        if ranks_per_node == 1:
            hop1 = None  # nothing to send inside a node
        self._node_sums = [NodeSum(operations, coded, hop1) for _ in range(nodes)]
        self._moments = torch.zeros_like(flat.master), torch.zeros_like(flat.master)
        self._matrices = slice(0, flat.kinds[TABLES].start if muon else 0)
        self._muon = None
        if muon is not None:
            momentum, matrices = self._moments[0][self._matrices], flat.matrices(split_qkv=muon.split_qkv)
            self._muon = Muon(momentum, matrices, muon, flat.compute.dtype)
        self._steps = torch.zeros((), device=flat.master.device)
        self._squares = torch.empty(flat.numel // SQUARES_BLOCK, device=flat.master.device)
        self.skipped = torch.zeros((), device=flat.master.device)  # steps whose gradient was not finite
        self.raised = 0  # units that sent 8 bits, added up over the steps
        self._send(torch.ones_like(self._steps))  # a reference begins as its key frame

    def accumulate(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Forward and backward of each rank's (B, T + 1) tokens; returns the mean loss."""
        total = torch.zeros((), device=self.flat.master.device)
        self.flat.model.train()
        for node, node_sum in enumerate(self._node_sums):
            for rank in range(self._local):
                tokens = micro_batches[node * self._local + rank]
                total += self.flat.backward(tokens)
                node_sum.add(self.flat.gradient)
            node_sum.end_micro_batch()
        return total / len(micro_batches)

    def step(self, learning_rate: float, *, iteration: int, micro_batches: int = 1) -> None:
        """Hop 2, the optimizer on the mean gradient, and the exchange of the weights."""
        flat, settings = self.flat, self._adamw
        nodes = [node_sum.take() for node_sum in self._node_sums]
        gradient = torch.empty_like(flat.master)
        for here, cross_node in self._sums:
            gradient[here] = cross_node([node[here] for node in nodes], iteration)
        divisor = torch.full_like(self._steps, micro_batches * self._nodes * self._local)
        self._operations.sum_squares(gradient, self._squares)
        norm = (self._squares.sum(dtype=torch.float64).sqrt() / divisor).float()
        skip = 1.0 - torch.isfinite(norm).float()
        shrink = torch.ones_like(norm)
        if settings.clip_grad > 0:
            shrink = torch.clamp((norm + 1e-6) / settings.clip_grad, min=1.0)
        self._steps += 1 - skip
        self.skipped += skip
        powers = [beta ** self._steps.double() for beta in (settings.beta1, settings.beta2)]
        scalars = AdamWScalars(
            divisor=divisor * shrink,
            found_inf=skip,
            bias_corrections=(1 - torch.stack(powers)).float(),
            learning_rate=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._update(gradient, scalars)
        self.raised += self._weights.begin_step()
        self._send(skip)

    @torch.no_grad()
    def _update(self, gradient: Tensor, scalars: AdamWScalars) -> None:
        """Changes the master weights; the gradient is the sum that `scalars` divides."""
        flat, matrices = self.flat, self._matrices
        if self._muon is not None:
            mean, rate = gradient[matrices] / scalars.divisor, scalars.learning_rate
            self._muon.step(flat.master[matrices], mean, rate, scalars.found_inf)
            scalars = replace(scalars, learning_rate=rate * self._muon.settings.scalar_lr)
        rest = slice(matrices.stop, flat.numel)
        master, first, second = (states[rest] for states in (flat.master, *self._moments))
        decayed = flat.decayed - rest.start
        self._operations.adamw(master, gradient[rest], first, second, None, scalars, decayed=decayed)

    @torch.no_grad()
    def evaluate(self, held_out: Tensor, size: int) -> float:
        """The mean loss of (n, T + 1) tokens, `size` at a time, with the weights that a forward reads."""
        self.flat.model.eval()
        losses = [self.flat.model(part[:, :-1], part[:, 1:]) for part in held_out.split(size)]
        return torch.stack(losses).double().mean().item()

    @torch.no_grad()
    def reference_lag(self, before: Tensor) -> float:
        """rms(w - r) over the rms of the last update, by the weights `before` it; 0 without references.

        Above 2 the exchange falls behind: a unit would need more bits.
        """
        lags = [0.0]
        for here, exchange in self._exchanges:
            if isinstance(exchange, Difference):
                master = self.flat.master[here]
                missing = (master - exchange.reference.float()).norm().item()
                update = (master - before[here]).norm().item()
                lags.append(missing / update if update else 0.0)
        return max(lags)

    def _send(self, skip: Tensor) -> None:
        with torch.no_grad():
            for here, exchange in self._exchanges:
                exchange(self.flat.master[here], self.flat.compute[here], skip)


def train(
    settings: RunSettings,
    rung: Rung,
    seed: int,
    *,
    device: torch.device,
    operations: Operations,
    text: Path | None = None,
) -> dict[str, Any]:
    """One run: the final loss, a curve, and what it took.

    Runs of one seed have the same initial weights and the same samples, whatever the rung. `text` is the
    folder that `settings.text` describes.
    """
    started = time.perf_counter()
    ranks, rate = _ranks(settings, rung, seed, device, operations), _rate(settings)
    per_step = settings.samples_per_step
    config, vocab = settings.model()
    length = config.seq_length + 1
    source = Source(vocab, length) if text is None else Text(text, length)
    held_out = source.held_out(settings.eval_samples).to(device)
    tokens = source.training(seed, settings.steps * per_step).to(device)
    tokens = tokens.view(
        settings.steps, settings.micro_batches, -1, settings.micro_batch_size, tokens.shape[1]
    )
    evaluated_at = _evaluated_at(settings)
    losses = torch.zeros(settings.steps, device=device)
    curve, lags, finals = [], [], []
    eval_size = max(settings.micro_batch_size, 16)
    for step in range(settings.steps):
        for micro_batches in tokens[step]:
            losses[step] += ranks.accumulate(micro_batches) / settings.micro_batches
        reported = (step + 1) % max(1, settings.steps // 20) == 0
        before = ranks.flat.master.clone() if reported else None
        ranks.step(rate(step * per_step), iteration=step, micro_batches=settings.micro_batches)
        if before is not None:
            lags.append((step + 1, round(ranks.reference_lag(before), 3)))
            curve.append((step + 1, round(losses[max(0, step - 19) : step + 1].mean().item(), 5)))
        if step + 1 in evaluated_at:
            finals.append(ranks.evaluate(held_out, eval_size))
    return {
        "loss": sum(finals) / len(finals),
        "evaluations": finals,
        "train": curve,
        "reference_lag": lags,
        "skipped": int(ranks.skipped.item()),
        "raised_units": ranks.raised,
        "sha256": hashlib.sha256(ranks.flat.master.cpu().numpy().tobytes()).hexdigest()[:16],
        "bytes_per_parameter": round(bytes_of(settings, rung, ranks.flat.numels), 4),
        "bytes_per_parameter_in_layers": round(bytes_of(settings, rung, {MLP: 1}), 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def bytes_of(settings: RunSettings, rung: Rung, numels: Mapping[str, int]) -> float:
    """Sent per step and parameter between nodes, or between islands."""
    if settings.islands is None:
        return rung.bytes_per_parameter(numels)
    return IslandSettings(**settings.islands).bytes_per_parameter


def _ranks(
    settings: RunSettings, rung: Rung, seed: int, device: torch.device, operations: Operations
) -> EmulatedRanks | Islands:
    """The ranks with their initial weights."""
    config, vocab = settings.model()
    flat = FlatModel(
        config,
        vocab,
        alignment=rung.largest_block,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[settings.precision],
        device=device,
        seed=seed,
        attention=DotProduct(None if settings.attention == "auto" else settings.attention),
    )
    if settings.graphs:
        flat.backward = Graphed(flat.backward).replay  # type: ignore[method-assign]
    if rung.nudged:
        flat.master[0] *= 1 + 2**-8

    def ranks(flat: FlatModel, nodes: int, ranks_per_node: int) -> EmulatedRanks:
        return EmulatedRanks(
            flat,
            rung,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            operations=operations,
            adamw=AdamWSettings(**settings.adamw),
            muon=None if settings.muon is None else MuonSettings(**settings.muon),
            seed=seed,
        )

    if settings.islands is None:
        return ranks(flat, settings.nodes, settings.ranks_per_node)
    return Islands(
        flat,
        lambda flat, count: ranks(flat, 1, count),
        IslandSettings(**settings.islands),
        operations,
        ranks=settings.nodes * settings.ranks_per_node,
        steps=settings.steps,
        seed=seed,
    )


def _rate(settings: RunSettings) -> LearningRate:
    return LearningRate.from_config(
        LearningRateConfig(
            lr=settings.lr,
            min_lr=settings.min_lr,
            lr_decay_style="cosine",
            lr_warmup_fraction=settings.warmup_fraction,
        ),
        samples=settings.steps * settings.samples_per_step,
        samples_per_iteration=settings.samples_per_step,
    )


def _joined(kinds: Mapping[str, slice], format_of: Callable[[str], Format]) -> list[tuple[Format, slice]]:
    """Formats and their ranges; neighbours of one format are one range, as no block has parts of both."""
    joined: list[tuple[Format, slice]] = []
    for kind, here in kinds.items():
        format = format_of(kind)
        if joined and joined[-1][0] == format:
            joined[-1] = format, slice(joined[-1][1].start, here.stop)
        elif here.start < here.stop:
            joined.append((format, here))
    return joined


def _evaluated_at(settings: RunSettings) -> set[int]:
    """Steps after which a run is evaluated: the last one, and others before it at equal distances."""
    distance = max(1, settings.steps // 10 // settings.evaluations)
    return {settings.steps - distance * index for index in range(settings.evaluations)} - {0}
