"""The engine: holds the model states of a run, sharded as the ZeRO stage says, and takes optimizer steps."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.comm_stream import CommStream, TrafficLedger
from megatron_zpp.distributed.spare_multiprocessors import spare_multiprocessors
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.exchange.sums import TORCH_SUMS, largest_over_ranks, sum_over_ranks
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.adamw import build_optimizer
from megatron_zpp.zero.buffers import Buffers
from megatron_zpp.zero.build import Initialize, build_units, layouts_of
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.communication_plan import plan_communication
from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.hooks import register_hooks
from megatron_zpp.zero.loss_scale import LossScale
from megatron_zpp.zero.model_states import ModelStates
from megatron_zpp.zero.optimizer import DeviceOptimizer, Rates, UpdateRule
from megatron_zpp.zero.prefetch import Phase
from megatron_zpp.zero.reads import distinct, reads_of, without_inner
from megatron_zpp.zero.sections import BACKWARD, FORWARD, UNTIMED, WAIT_REDUCTIONS, Sections
from megatron_zpp.zero.step_sums import StepSums, divisor_of, shrink_of
from megatron_zpp.zero.tensor_parallel import ALONE, ExchangeCounter, TensorShare
from megatron_zpp.zero.weight_codes import ProductScaling, WeightEncoder
from megatron_zpp.zero.weights import Weights

# (B, T + 1) tokens, whose inputs and targets overlap by T - 1; or the model's arguments, targets second.
Batch: TypeAlias = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, as scalars on the device: reading one waits for it.

    `grad_norm` is the global norm before clipping; `skipped` is 1 when it was not finite. `raised_units`, a
    number of the host, is how many units sent their weight differences in 8 bits; None where none are sent.
    `weight` is the sum of the weights of all losses of the step, if they had weights.
    """

    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    raised_units: int | None = None
    weight: Tensor | None = None


class ZeroEngine:
    """One engine for all stages: the stage says what stays whole on every rank.

    `model(tokens, targets)` returns a mean loss; a batch may bring more arguments. `units` are the names and
    modules whose parameters are gathered together, in forward order, by default what its `units()` returns.
    Its `recomputed_units()` returns ranges of these whose forward the backward repeats, by default none.
    Modules with the same parameters read one unit. `initialize(name, tensor)` fills a parameter,
    in fp32, or a buffer on the meta device. Parameters become views of flat memory on `device`, and this rank
    holds no more of them than the stage says. Those that do not require gradients are gathered, and not
    trained. `share` says of which parameters the model has this rank's part: tensor ranks have some, or other
    ranks of `mesh`, and units are sharded over those that have the same. `rule` is the arithmetic of another
    optimizer than AdamW. `operations` has the kernels for sums and optimizer steps; None: torch's. `sections`
    times the parts of a step. `say` gets a line if copy engines were tried and cannot be used, and on rank 0
    one that names the buffers which `initialize` filled. Parameters whose names are `decoupled` have a
    learning rate of their own; `rate_factors`, by name, multiply learning rate and epsilon of AdamW. With
    Muon, `matrices` are the parameters that it trains, by name, and the rows of each matrix in them; their
    units are held inside nodes. The units `inside_nodes` are sharded among the ranks of a node alone: each
    node holds them by itself, so their weights do not cross nodes. `scaling` has the scales of 8-bit products
    if they follow from earlier steps. `codes` encodes the weights that are held as codes, by these scales.

    Raises ValueError for settings that these ranks cannot obey; api/checks.py refuses models that cannot be
    trained as they are. Passes raise RuntimeError where a parameter is read while its unit is not gathered,
    and on several ranks where a forward changes a persistent buffer.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: EngineConfig,
        *,
        initialize: Initialize,
        device: torch.device,
        units: Sequence[tuple[str, nn.Module]] | None = None,
        share: TensorShare = ALONE,
        rule: UpdateRule | None = None,
        fused_backend: Literal["apex", "torch"] = "torch",
        operations: Operations | None = None,
        timeout: timedelta | None = None,
        sections: Sections = UNTIMED,
        say: Callable[[str], None] = print,
        decoupled: Collection[str] = (),
        rate_factors: Mapping[str, float] = MappingProxyType({}),
        matrices: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        inside_nodes: Collection[str] = (),
        scaling: ProductScaling | None = None,
        codes: WeightEncoder | None = None,
    ) -> None:
        of_model: Any = model  # which may say what is recomputed
        modules = without_inner(of_model.units() if units is None else units)
        named = distinct(modules)
        _check_settings(config, mesh, share, operations, device, coded=codes is not None)
        self.model, self.mesh, self.device = model, mesh, device
        self.topology, self.scaling, self.sections = Topology.of(mesh), scaling, sections
        self._config_of_optimizer, self._decouples = config.optimizer, bool(decoupled)
        self._ledger, sums, copy_engines = TrafficLedger(mesh), operations or TORCH_SUMS, False
        if device.type == "cuda":  # CPUs have none
            from megatron_zpp.distributed.copy_engine_trial import choose_copy_engines

            copy_engines = choose_copy_engines(mesh, device, timeout, say)
        block, coded = max(config.zero.largest_block, share.block), () if codes is None else codes.names
        self.plan = plan = plan_communication(
            config.zero,
            mesh,
            layouts_of(named, mesh, block, share.splits, coded, decoupled, rate_factors, matrices),
            compute_dtype=getattr(torch, config.precision.compute_dtype(device.type)),
            reduce_in_bf16=config.precision.grad_reduce_in_bf16,
            copy_engines=copy_engines,
            reads=reads_of(modules, getattr(of_model, "recomputed_units", list)()),
            inside_nodes=[at for at, (name, _) in enumerate(named) if name in inside_nodes],
        )

        def stream(ranks: Sequence[int]) -> CommStream:
            return CommStream(ranks, mesh, device, self._ledger, timeout, copy_engines=plan.copy_engines)

        self._communication = communication = Communication(plan, stream, sums)
        self.units = build_units(modules, communication, config, device, codes, initialize)
        self.buffers = Buffers(model, initialize, device, mesh, say)
        self._trained = trained = [unit for unit in self.units if not unit.frozen]
        for comm_stream in communication.comm_streams:
            comm_stream.ready()
        self.weights = Weights(self.units, communication, sections, codes, sums)
        self._optimizer = build_optimizer(
            config.optimizer, trained, communication, fused_backend, operations, self.weights.write, rule
        )
        self.states = ModelStates(self.units, self.weights, self._optimizer, mesh)
        accepts_16bit = self._optimizer.accepts_16bit_gradients
        self._gradients = Gradients(trained, communication, sums, accepts_16bit=accepts_16bit, share=share)
        self._sums = StepSums(trained, self._gradients, self.weights, mesh, sections)
        self._exchanges = ExchangeCounter(share.exchanges, self._ledger, mesh, self.plan.made)
        self._hooks = register_hooks(
            modules, self.units, self.plan.reads, self.weights.prefetcher, self._gradients, self._exchanges
        )
        self.loss_scale = LossScale(config.precision, device)
        self._in_backward = None
        if config.optimizer.optimizer_in_backward:
            from megatron_zpp.zero.optimizer_in_backward import StepInBackward

            assert not any(weights.bring for weights in plan.units)  # between ranks
            assert isinstance(self._optimizer, DeviceOptimizer)
            prefetcher, clip_grad = self.weights.prefetcher, config.optimizer.clip_grad
            self._in_backward = StepInBackward(
                trained, self._optimizer, self._gradients, prefetcher, clip_grad
            )
        self.iteration = 0  # steps begun so far, with skipped ones; the rotation of gradients depends on it
        self._summed_gradients = 1  # how many gradients the sums of a step are sums of
        self._weight: float | None = None  # the sum of those of this rank's losses; None without weights
        self.spare = spare_multiprocessors(mesh.nodes, device, os.environ)
        self._closed = False

    def begin_step(self, learning_rate: float, decoupled_rate: float | None = None) -> None:
        """With --optimizer-in-backward: let the next backward step each unit, at the rates that `step` gets.

        Call it before `accumulate`. A unit's parameters change when all their gradients are there. A backward
        that reads them later, as that of a product with a detached weight may, raises RuntimeError. Raises
        ValueError without the flag.
        """
        if self._in_backward is None:
            fix = "without --optimizer-in-backward units step after the backward; call step alone"
            raise option_error("begin_step", learning_rate, fix)
        self._in_backward.rates = self._rates(learning_rate, decoupled_rate)

    def accumulate(
        self, batch: Batch, *, index: int = 0, micro_batches: int = 1, weight: float | None = None
    ) -> Tensor:
        """Add the gradients of micro-batch `index` of a step's `micro_batches`; return its mean loss.

        With a `weight` for each micro-batch of each rank, of about 1, the step takes the weighted mean.

        The loss is this rank's, a scalar on the device. Sums over ranks run behind the backward. A NaN or Inf
        of the loss becomes one of the gradients, which would not follow from every Inf.

        `step` divides by micro-batches × ranks with other tokens, together with the loss scale. A unit that
        only some of these sum has gradients of the others' tokens already. A division before the backward
        would cancel the loss scale: with 8 micro-batches on 1,024 ranks a scale of 65536 would act as 8, and
        fp16 gradients would underflow. A division of the 16-bit gradients would lose the same bits. The sums
        cannot overflow without it, because fp16 gradients, at most 65504, are summed in fp32 or bf16, which
        hold 2^111 times as much.
        """
        self._config_of_optimizer.check_batch(self.mesh.world_size, micro_batches)
        self.weights.encode_changed()
        if self.scaling is not None and index == 0:
            self.scaling.begin_step()
        self.weights.prefetcher.begin(Phase.FORWARD)
        with self.sections(FORWARD):
            loss = self._loss(batch)
        self.weights.prefetcher.begin(Phase.BACKWARD)
        with self.sections(WAIT_REDUCTIONS):
            last = index == micro_batches - 1
            count = micro_batches * self.mesh.shard_ranks
            self._gradients.begin(
                first=index == 0,
                last=last,
                iteration=self.iteration,
                scale=self.loss_scale.scale,
                count=count,
            )
        if index == 0:
            self._summed_gradients = count
            self._weight = None if weight is None else 0.0
        scale = self.loss_scale.scale
        if weight is not None:
            assert self._weight is not None, "all micro-batches of a step have weights, or none has"
            self._weight += weight
            scale = scale * weight
        if self._in_backward is not None:
            self._in_backward.begin(loss.detach(), self._weight)
        scaled = loss * (scale + 0.0 * loss.detach())
        self.spare.reserve_in_backward_of(scaled)
        with self.sections(BACKWARD):
            try:
                scaled.backward()
            except RuntimeError as error:
                stale = (unit.guard.of_backward(error) for unit in self.units)
                raise next(filter(None, stale), error) from error
            self._gradients.finish_backward()
        if self._in_backward is not None:
            self._in_backward.finish_backward()
        return loss.detach()

    def step(self, learning_rate: float, decoupled_rate: float | None = None) -> StepResult:
        """One optimizer step on the mean gradient of the micro-batches since the last step.

        A NaN or Inf in the gradients of any rank skips the step on every rank: all see the same norm.
        `decoupled_rate` is the learning rate of the decoupled parameters, by default the same. Raises
        ValueError if it is given and no parameter is decoupled.
        """
        rates = self._rates(learning_rate, decoupled_rate)
        scale = self.loss_scale.scale
        formats = self.weights.formats
        if self._in_backward is not None:
            grad_norm, weight = self._in_backward.end(rates)
        else:
            norm, weight = self._sums.of_gradients(self._weight)
            divisor = divisor_of(scale, self._summed_gradients, weight)
            grad_norm = (norm / divisor).float()
        found_inf = 1.0 - torch.isfinite(grad_norm).float()
        if self.scaling is not None:
            maxima = largest_over_ranks(self.scaling.maxima(), self.mesh)
            self.scaling.end_step(maxima, found_inf)
        if self._in_backward is None:
            shrink = shrink_of(grad_norm, self._config_of_optimizer.clip_grad)
            self._optimizer.begin_step(rates, divisor * shrink, found_inf)
            self.weights.begin_step()
            for number, unit in enumerate(self._trained):
                self._optimizer.update(number)
                self.weights.updated(unit.number, found_inf)
        self._gradients.end_step(found_inf)
        self.iteration += 1
        self.loss_scale.update(found_inf)
        raised = None if formats is None else formats.raised
        return StepResult(grad_norm, found_inf, scale, raised, weight)

    def close(self) -> None:
        """Remove the hooks, which tie model and engine in a cycle, and close the communication streams.

        Every rank must call it at the end of a run; states may be saved after it. After an error it may wait
        for the others.
        """
        self._closed = True
        self._gradients.wait()  # sums that no step has taken must not outlive their group
        for handle in self._hooks:
            handle.remove()
        for comm_stream in self._communication.comm_streams:
            comm_stream.close()
        self.spare.close()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of a batch without dropout, not reduced over ranks. Every rank must call it."""
        with self._evaluating("evaluate"):
            return self._loss(batch)

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor, *, after: int = -1) -> Tensor:
        """The logits (V,) fp32, on the CPU, of the token after place `after` of `tokens` (1, T).

        Positions do not count what is behind that place. Every rank must call it.
        """
        positions: Tensor | None = None
        if after >= 0:  # else all are of one text
            positions = torch.arange(tokens.shape[1], device=self.device)[None].clamp(max=after)
        with self._evaluating("next_token_logits"):
            self.spare.reserve()
            logits = self.model(tokens.to(self.device), None, positions)
            return logits[0, after].float().cpu()

    def take_traffic(self) -> tuple[int, int]:
        """Bytes sent by this rank (inside its node, between nodes) since the last call."""
        for comm_stream in self._communication.comm_streams:
            comm_stream.settle()
        return self._ledger.take()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks of the job."""
        return sum_over_ranks(value, self.mesh)

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over ranks with different tokens; tensor ranks have the same value."""
        counted = value if self.mesh.tensor_rank == 0 else torch.zeros_like(value)
        return sum_over_ranks(counted, self.mesh) / self.mesh.shard_ranks

    def weights_norm(self) -> Tensor:
        """The norm () fp64 of the master weights that are trained; every rank must call it."""
        return self._sums.norm_of_weights()

    @property
    def last_norm(self) -> float | None:
        """The norm by which the next step is clipped, with --optimizer-in-backward; None without."""
        return None if self._in_backward is None else self._in_backward.last_norm.item()

    def load_last_norm(self, norm: float | None) -> None:
        """The inverse of `last_norm`; None, of a run that had none, is as at the start of a run."""
        if self._in_backward is not None:
            self._in_backward.last_norm.fill_(norm or 0.0)

    def _check_open(self, call: str) -> None:
        """Raise RuntimeError after `close`: a pass without hooks trains nothing."""
        if self._closed:
            raise RuntimeError(f"{call}: the engine is closed; call close() behind the last pass")

    def _rates(self, learning_rate: float, decoupled_rate: float | None) -> Rates:
        if decoupled_rate is not None and not self._decouples:
            fix = "no parameter is decoupled; name some in ZeroEngine's decoupled"
            raise option_error("decoupled_rate", decoupled_rate, fix)
        for name, rate in (("learning_rate", learning_rate), ("decoupled_rate", decoupled_rate)):
            if rate is not None and (isinstance(rate, str) or not 0 <= rate < math.inf):  # YAML reads 1e-3 so
                raise option_error(name, rate, "must be a number of at least 0")
        return learning_rate, learning_rate if decoupled_rate is None else decoupled_rate

    @contextmanager
    def _evaluating(self, call: str) -> Iterator[None]:
        """A forward without gradients, no part of a step, with all modules in evaluation mode meanwhile."""
        self._check_open(call)
        self.weights.encode_changed()
        modes = [(module, module.training) for module in self.model.modules()]
        self.weights.prefetcher.begin(Phase.FORWARD)
        try:
            self.model.eval()
            with self.sections.paused():
                yield
        finally:
            for module, mode in modes:
                module.train(mode)  # a model's own train() undoes what its eval() did

    def _loss(self, batch: Batch) -> Tensor:
        self.spare.reserve()
        if isinstance(batch, Tensor):
            tokens = batch.to(self.device, non_blocking=True)
            moved: list[Tensor | None] = [tokens[:, :-1], tokens[:, 1:]]
        else:
            moved = [part if part is None else part.to(self.device, non_blocking=True) for part in batch]
        assert moved[0] is not None  # the tokens
        self._exchanges.begin(moved[0].numel())
        buffers = self.buffers.versions()
        loss = self.model(*moved)
        self.buffers.check_unchanged(buffers)
        return loss


def _check_settings(
    config: EngineConfig,
    mesh: Mesh,
    share: TensorShare,
    operations: Operations | None,
    device: torch.device,
    *,
    coded: bool,
) -> None:
    """Raise ValueError for settings that these ranks cannot obey. `coded`: some weights are held as codes."""
    zero, dtype = config.zero, config.precision.compute_dtype(device.type)
    config.optimizer.check_weights(zero, dtype, coded=coded)
    config.optimizer.check_batch(mesh.world_size, 1)
    check_routes(zero, mesh)
    sharing = 1 if share.group is None else share.group.size
    if mesh.tensor_ranks != sharing:
        raise option_error("tensor_ranks", mesh.tensor_ranks, f"the model is shared among {sharing}")
    if zero.quantizes and operations is None:
        fix = f'codes need them; give load_operations("{device.type}", require_kernels=False, say=print)'
        raise option_error("operations", operations, fix)
