"""Holds the model states of a run, sharded as far as the ZeRO stage says, and takes optimizer steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.copy_engine_trial import choose_copy_engines
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.ops.checks import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.build import Initialize, UnitBuilder, layouts_of
from megatron_zpp.zero.collectives.plain import sum_over_ranks, sum_squares
from megatron_zpp.zero.communication import build_communication
from megatron_zpp.zero.gathers import Gathers, Phase
from megatron_zpp.zero.hooks import register_hooks
from megatron_zpp.zero.loss_scale import LossScale
from megatron_zpp.zero.optimizer import build_optimizer
from megatron_zpp.zero.reductions import Reductions
from megatron_zpp.zero.sections import (
    BACKWARD,
    FORWARD,
    GRADIENT_NORM,
    UNTIMED,
    WAIT_REDUCTIONS,
    Sections,
)
from megatron_zpp.zero.unit import Residency, Unit

WEIGHTS = "weights"

# Of (B, T + 1) tokens inputs and targets overlap by T - 1; else the arguments of the model, targets second.
Batch: TypeAlias = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, as scalars on the device: reading one waits for it.

    `grad_norm` is the global norm before clipping; `skipped` is 1 when it was not finite.
    """

    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor


class ZeroEngine:
    """Stages are residency: one engine, and the stage says what stays whole on every rank.

    `model(tokens, targets)` returns a mean loss (what else it takes comes with a batch). `model.units()` are
    its modules in forward order, and `model.recomputed_units()` the ranges of them whose forward its backward
    repeats. Its parameters are on the meta device; `initialize(name, tensor)` fills one. They become views of
    flat buffers on `device`, and the rank holds no more of them than the stage says. Sums and optimizer steps
    are the kernels of `operations`, or torch's where there are none. `sections` times the parts of a step.
    `say` gets a line where copy engines were tried and cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        initialize: Initialize,
        *,
        zero: ZeroConfig,
        optimizer: OptimizerConfig,
        precision: PrecisionConfig,
        topology: Topology,
        device: torch.device,
        fused_backend: Literal["apex", "torch"] = "torch",
        operations: Operations | None = None,
        timeout: timedelta | None = None,
        sections: Sections = UNTIMED,
        say: Callable[[str], None] = print,
    ) -> None:
        self.model, self.topology, self.device = model, topology, device
        self._ledger, self.sections = TrafficLedger(topology), sections
        self._clip_grad, self._operations = optimizer.clip_grad, operations
        residency = Residency(zero.zero_stage)
        dtype = getattr(torch, precision.compute_dtype(device.type))
        sent = reduce_dtype(residency, precision, dtype)
        prefetch = zero.zero_prefetch_units or 0  # None below stage 3, where no gather is ahead of its unit
        named_modules = model.units()
        self.copy_engines = choose_copy_engines(zero.zero_copy_engines, topology, device, timeout, say)
        layouts = layouts_of(named_modules, topology.world_size, zero.shard_multiple, zero.largest_block)
        self._communication = communication = build_communication(
            zero,
            topology,
            lambda ranks: CommStream(
                ranks, topology, device, self._ledger, timeout, copy_engines=self.copy_engines
            ),
            layouts,
            dtype=dtype,
            reduce_dtype=sent,
            sum_dtype=sum_dtype(precision),
            operations=operations,
        )
        self.units = UnitBuilder(
            residency,
            topology,
            device,
            communication,
            dtype=dtype,
            prefetch=prefetch,
            offload_optimizer=zero.zero_offload_optimizer,
            error_feedback=zero.zero_gradient_error_feedback,
        ).build(named_modules, layouts, initialize)
        for comm_stream in self._communication.comm_streams:
            comm_stream.ready()
        secondary = communication.secondary.gather if communication.secondary else None
        self._gathers = Gathers(
            self.units, communication.gather, secondary, prefetch, sections, model.recomputed_units()
        )
        self._optimizer = build_optimizer(optimizer, self.units, communication, fused_backend, operations)
        alone = topology.world_size == 1 and not zero.zero_quantized_gradients
        self._reductions = Reductions(
            self.units,
            communication.reduction,
            residency,
            sent,
            sums=not (alone and self._optimizer.accepts_16bit_gradients),
        )
        self._hooks = register_hooks(
            [module for _, module in named_modules], self.units, self._gathers, self._reductions
        )
        self.loss_scale = LossScale(precision, device)
        self.summed_gradients = 1  # that the sums of a step, and what feedback owes, are sums of

    def accumulate(self, batch: Batch, *, index: int, micro_batches: int) -> Tensor:
        """Adds the gradients of micro-batch `index` of a step's `micro_batches`; returns its mean loss.

        A NaN or Inf of the loss becomes one of the gradients, which would not follow from every Inf.

        The loss is this rank's, a scalar on the device. Sums over ranks run behind the backward.

        The division by micro-batches × ranks comes behind the sums, with that by the loss scale: in `step`.
        Before the backward it would cancel the loss scale. With 8 micro-batches on 1,024 ranks 65536 would
        act as 8, and fp16 gradients would underflow. Dividing the 16-bit gradients themselves would lose the
        same bits behind the backward. The sums need no division to be safe: fp16 gradients, which are at
        most 65504, are sent as they are and summed in fp32 or bf16, which hold 2^111 times as much.
        """
        if not self.model.training:  # it walks through all modules
            self.model.train()
        self._gathers.begin(Phase.FORWARD)
        with self.sections(FORWARD):
            loss = self._loss(batch)
        self._gathers.begin(Phase.BACKWARD)
        with self.sections(WAIT_REDUCTIONS):
            self._reductions.begin(first=index == 0, last=index == micro_batches - 1)
        if index == 0:
            self._begin_sums_of(micro_batches * self.topology.world_size)
        with self.sections(BACKWARD):
            (loss * (self.loss_scale.scale + 0.0 * loss.detach())).backward()
            self._reductions.finish_backward()
        return loss.detach()

    def step(self, learning_rate: float) -> StepResult:
        """One optimizer step on the mean gradient of the micro-batches since the last step.

        A NaN or Inf in the gradients of any rank skips the step on every rank: all see the same norm.
        """
        scale = self.loss_scale.scale
        divisor = scale * self.summed_gradients  # from sums of scaled gradients to their mean
        grad_norm = self._gradient_norm(divisor)
        found_inf = 1.0 - torch.isfinite(grad_norm).float()
        shrink = torch.ones_like(grad_norm)
        if self._clip_grad > 0:
            shrink = torch.clamp((grad_norm + 1e-6) / self._clip_grad, min=1.0)
        self._gathers.write_gather_source(self._optimizer.step(learning_rate, divisor * shrink, found_inf))
        self._reductions.release()
        self.loss_scale.update(found_inf)
        self._reductions.settle_errors(
            found_inf, self.loss_scale.scale / scale if self.loss_scale.dynamic else None
        )
        return StepResult(grad_norm, found_inf, scale)

    def close(self) -> None:
        """Unhooks the model, since the hooks tie it to the engine in a cycle, and lets go of the lanes.

        At the end of a run on every rank; after an error it may wait for the others.
        """
        for handle in self._hooks:
            handle.remove()
        for comm_stream in self._communication.comm_streams:
            comm_stream.close()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of a batch without dropout, not reduced over ranks."""
        self.model.eval()
        self._gathers.begin(Phase.FORWARD)
        with self.sections.unheard():
            return self._loss(batch)

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """The logits (V) fp32, on the CPU, of what follows `tokens` (1, T); every rank must call it."""
        self.model.eval()
        self._gathers.begin(Phase.FORWARD)
        with self.sections.unheard():
            return self.model(tokens.to(self.device))[0, -1].float().cpu()

    def take_traffic(self) -> tuple[int, int]:
        """Bytes sent by this rank (inside its node, between nodes) since the last call."""
        for comm_stream in self._communication.comm_streams:
            comm_stream.settle()
        return self._ledger.take()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks."""
        return sum_over_ranks(value, self.topology)

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all ranks."""
        return sum_over_ranks(value, self.topology) / self.topology.world_size

    @property
    def optimizer_steps(self) -> int:
        """Steps that the optimizer has taken; skipped ones do not count."""
        return int(self._optimizer.steps.item())

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """What a checkpoint saves per unit: the weights, and the states of the optimizer."""
        return (WEIGHTS, *self._optimizer.state_names)

    def shards(self, kind: str) -> list[Tensor]:
        """This rank's shard (shard_numel,) fp32 of one of `state_kinds`, by unit: not a copy.

        At stage 0, where every rank has all, the shard that it would have at other stages.
        """
        flats = zip(self.units, self._flats(kind), strict=True)
        owned = (unit.layout.shard(self.topology.rank) for unit in self.units)
        return [
            flat[shard.start : shard.stop] if unit.whole else flat
            for (unit, flat), shard in zip(flats, owned, strict=True)
        ]

    def load_states(self, kind: str, read: Callable[[int, range], Tensor]) -> None:
        """Takes over one of `state_kinds`; `read(unit, elements)` gives a part of a unit's flat buffer.

        Elements behind the last parameter are not asked for. They are zero and stay zero.
        """
        for index, (unit, flat) in enumerate(zip(self.units, self._flats(kind), strict=True)):
            unit.slot.wait()  # a gather ahead may still be reading what is published
            stop = min(unit.owned.stop, unit.layout.offsets[-1])
            if unit.owned.start < stop:
                elements = range(unit.owned.start, stop)
                flat[: len(elements)].copy_(read(index, elements))
            if kind == WEIGHTS:
                self._communication.gather.write_gather_source(unit.master, unit.gather_source)
                unit.changed()

    @property
    def feeds_back(self) -> bool:
        """Whether reductions keep what they lost (--zero-gradient-error-feedback)."""
        return self.units[0].error is not None

    @property
    def error_layout(self) -> list[int]:
        """What the errors of two runs must have in common to be of use to both; empty without feedback."""
        if not self.feeds_back:
            return []
        grid = [self.topology.nodes, self.topology.local_world_size]
        return [*grid, self._communication.reduction.block, *(unit.error.numel() for unit in self.units)]

    def load_optimizer_steps(self, steps: int) -> None:
        """The inverse of `optimizer_steps`."""
        self._optimizer.steps.fill_(steps)

    def _flats(self, kind: str) -> list[Tensor]:
        if kind == WEIGHTS:
            return [unit.master for unit in self.units]
        return [states[kind] for states in self._optimizer.states]

    def _begin_sums_of(self, gradients: int) -> None:
        """The sums of this step are of so many gradients; what feedback owes becomes the same multiple."""
        if self.feeds_back and gradients != self.summed_gradients:
            for unit in self.units:
                unit.error.mul_(gradients / self.summed_gradients)
        self.summed_gradients = gradients

    def _gradient_norm(self, divisor: Tensor) -> Tensor:
        """Of the whole mean gradient, which is the sums / `divisor`.

        It is summed in fp32 in blocks that no shard cuts, then in fp64, whose rounding does not show.
        So the clipping factor has the same bits however the gradient is sharded.
        """
        squares = []
        for units in (self.units[1:], self.units[:1]):  # the first one's gradient is the last to be summed
            with self.sections(WAIT_REDUCTIONS):
                self._reductions.wait(units)
            with self.sections(GRADIENT_NORM):
                squares += [self._squares(unit) for unit in units]
        with self.sections(GRADIENT_NORM):
            total = torch.cat(squares).sum(dtype=torch.float64)
            if not self.units[0].whole:
                total = sum_over_ranks(total, self.topology)
            return (total.sqrt() / divisor).float()

    def _squares(self, unit: Unit) -> Tensor:
        """The sums of the squares of each block of a unit's gradient."""
        if unit.squares is not None:
            return unit.squares
        counts = [len(part.flat) // SQUARES_BLOCK for part in unit.gradients]
        sums = torch.empty(sum(counts), device=self.device)
        for part, its_sums in zip(unit.gradients, sums.split(counts), strict=True):
            sum_squares(self._operations, part.flat, its_sums)
        return sums

    def _loss(self, batch: Batch) -> Tensor:
        if isinstance(batch, Tensor):
            tokens = batch.to(self.device, non_blocking=True)
            return self.model(tokens[:, :-1], tokens[:, 1:])
        moved = (part if part is None else part.to(self.device, non_blocking=True) for part in batch)
        return self.model(*moved)


def reduce_dtype(residency: Residency, precision: PrecisionConfig, dtype: torch.dtype) -> torch.dtype:
    """The format in which gradients are sent.

    Sharded ones go out after each backward in the format it made them in, which loses nothing as they are
    summed in fp32. Sums over micro-batches need fp32, unless told otherwise; a step's only one is sent as it
    made them.
    """
    if precision.grad_reduce_in_bf16:
        return torch.bfloat16
    return dtype if residency.gradients_sharded else torch.float32


def sum_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The format in which a node's sums of gradients are sent to others: a 16-bit one would round them."""
    return torch.bfloat16 if precision.grad_reduce_in_bf16 else torch.float32
