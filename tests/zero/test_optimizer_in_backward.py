"""Steps in the backward: the weights of the usual order, clipping, what is skipped, resuming, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_zpp
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.build import build_model
from megatron_zpp.train.setup.build_engine import DECOUPLED
from megatron_zpp.zero.engine import StepResult, ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.zero.engines import all_states, engine_of, model_of, operations, same_bits, weights_of

VOCAB, RATE = 101, 1e-2
MODEL = model_of(num_layers=3)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True)
# eps: a key bias has no gradient but rounding
CLIPPED = OptimizerConfig(weight_decay=0.1, adam_eps=1e-4, clip_grad=0.5, optimizer_in_backward=True)
PLAIN = replace(CLIPPED, clip_grad=0)
COMPACT = replace(
    PLAIN,
    use_precision_aware_optimizer=True,
    exp_avg_dtype="fp8",
    exp_avg_sq_dtype="fp8",
    main_params_dtype="bf16+8",
)
CHUNKS = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
COMPILED: dict[str, Any] = {"operations": operations(), "precision": PrecisionConfig(bf16=True)}


def engine_in(optimizer: OptimizerConfig, model: ModelConfig = MODEL, **options: Any) -> ZeroEngine:
    return engine_of(model, VOCAB, optimizer=optimizer, **options)


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(step))


def steps(engine: ZeroEngine, numbers: range, *rates: float, weight: float | None = None) -> list[StepResult]:
    found, rates = [], rates or (RATE,)
    for number in numbers:
        if engine._in_backward is not None:
            engine.begin_step(*rates)
        engine.accumulate(tokens_of(number), weight=weight)
        found.append(engine.step(*rates))
    return found


def assert_equal_states(one: ZeroEngine, other: ZeroEngine) -> None:
    assert same_bits(all_states(one), all_states(other))
    assert one.states.optimizer_steps == other.states.optimizer_steps


@pytest.mark.parametrize(
    ("optimizer", "model", "options", "arguments"),
    [
        (PLAIN, MODEL, {}, {}),
        (replace(PLAIN, clip_grad=1e3), MODEL, COMPILED, {"weight": 0.7}),
        (COMPACT, MODEL, COMPILED, {}),
        (COMPACT, UNTIED, COMPILED | {"zero": ZeroConfig(zero_stage=3), "recompute": CHUNKS}, {}),
        (PLAIN, MODEL, {"zero": ZeroConfig(zero_unit="sublayer"), "recompute": CHUNKS}, {}),
        (PLAIN, MODEL, COMPILED | {"zero": ZeroConfig(zero_stage=3, zero_quantized_weights=True)}, {}),
        (PLAIN, UNTIED, COMPILED | {"decoupled": DECOUPLED}, {"decoupled": 3e-3}),
    ],
    ids=["fp32", "weighted", "compact", "chunks", "sublayers", "qwZ", "decoupled"],
)
def test_unclipped_weights_are_those_of_the_usual_order(
    optimizer: OptimizerConfig, model: ModelConfig, options: dict[str, Any], arguments: dict[str, float]
) -> None:
    """Bit for bit, with the moments, the norms and the losses."""
    ours = engine_in(optimizer, model, **options)
    usual = engine_in(replace(optimizer, optimizer_in_backward=False), model, **options)
    rates = (RATE, arguments["decoupled"]) if "decoupled" in arguments else (RATE,)
    found, expected = (
        steps(each, range(4), *rates, weight=arguments.get("weight")) for each in (ours, usual)
    )
    assert [step.grad_norm for step in found] == [step.grad_norm for step in expected]
    assert [step.weight for step in found] == [step.weight for step in expected]
    assert_equal_states(ours, usual)
    assert ours.evaluate(tokens_of(9)) == usual.evaluate(tokens_of(9))
    assert not any(unit.grad.segments for unit in ours.units)


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_units_are_clipped_by_the_last_norm_or_a_larger_one_so_far(model: ModelConfig) -> None:
    """Against torch's AdamW on whole gradients, which are clipped in the order of the backward."""
    engine = engine_in(CLIPPED, model)
    reference = build_model(model, VOCAB)
    named = dict(reference.named_parameters())
    for name, parameter in named.items():
        reference.initialize_parameter(name, parameter.data, 3)
    adamw = torch.optim.AdamW(
        [
            {"params": [each for each in named.values() if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in named.values() if each.ndim == 1], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.9, 0.999),
        eps=1e-4,
    )
    last, by_last, by_own = 0.0, 0, 0
    for number in range(4):
        (result,) = steps(engine, range(number, number + 1))
        tokens = tokens_of(number)
        reference(tokens[:, :-1], tokens[:, 1:]).backward()
        squares = 0.0
        for unit in reversed(engine.units):
            gradients = [named[name].grad for name in unit.names]
            squares += sum(each.double().square().sum().item() for each in gradients if each is not None)
            by_last, by_own = by_last + (last > squares**0.5), by_own + (squares**0.5 > last)
            torch._foreach_div_(gradients, max(1.0, max(last, squares**0.5) / 0.5))
        last = squares**0.5
        adamw.step()
        adamw.zero_grad()
        assert result.grad_norm.item() == pytest.approx(last, rel=1e-4)
    assert last > 0.5
    assert min(by_last, by_own) >= 3  # both rules count
    for name, weight in weights_of(engine).items():
        torch.testing.assert_close(weight, named[name].detach(), rtol=0, atol=2e-5)


def infinite(engine: ZeroEngine, unit: int) -> Callable[[], None]:
    hook = engine.units[unit].parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    return hook.remove


def test_what_is_not_finite_skips_a_step_or_the_rest_of_one() -> None:
    engine = engine_in(CLIPPED)
    steps(engine, range(2))
    before, norm = all_states(engine), engine.last_norm
    healthy = engine._loss
    engine._loss = lambda batch: healthy(batch) * torch.nan  # type: ignore[method-assign]
    assert steps(engine, range(1))[0].skipped
    engine._loss = healthy  # type: ignore[method-assign]
    assert same_bits(all_states(engine), before)
    assert (engine.states.optimizer_steps, engine.last_norm) == (2, norm)
    heal = infinite(engine, 2)
    assert steps(engine, range(1))[0].skipped
    heal()
    after = weights_of(engine)
    changed = [any((after[n] != before[f"weights/{n}"]).any() for n in u.names) for u in engine.units]
    assert changed == [False, False, False, True, True]  # the backward begins with the last unit
    assert engine.last_norm == norm
    assert not any(step.skipped for step in steps(engine, range(3)))


@pytest.mark.parametrize("optimizer", [CLIPPED, COMPACT])
def test_runs_resume_bit_for_bit_and_with_the_other_order(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    options = COMPILED if optimizer is COMPACT else {}
    engine = engine_in(optimizer, **options)
    steps(engine, range(3))
    path = save(tmp_path, engine)
    resumed = engine_in(optimizer, seed=99, **options)
    usual = engine_in(replace(optimizer, optimizer_in_backward=False), seed=99, **options)
    for each in (resumed, usual):
        load_checkpoint(path, each, TOKENIZER, with_optimizer=True)
        assert_equal_states(each, engine)
    assert resumed.last_norm == engine.last_norm
    steps(resumed, range(3, 5))
    steps(usual, range(3, 5))
    back = engine_in(optimizer, seed=99, **options)
    load_checkpoint(save(tmp_path / "usual", usual), back, TOKENIZER, with_optimizer=True)
    assert_equal_states(back, usual)
    assert back.last_norm == 0
    steps(engine, range(3, 5))
    assert_equal_states(resumed, engine)


def test_what_cannot_be_right_is_refused() -> None:
    flag = r"--optimizer-in-backward \(given\): "
    for options, said in (
        ({"precision": PrecisionConfig(fp16=True)}, "needs --bf16 or --fp32"),
        ({"zero": ZeroConfig(zero_offload_optimizer=True)}, "omit --zero-offload-optimizer"),
        ({"topology": Topology(0, 2, 0, 2)}, "this run has 2 ranks and 1 micro-batch$"),
    ):
        with pytest.raises(ValueError, match=flag + ".*" + said):
            engine_in(PLAIN, **options)
    engine = engine_in(PLAIN)
    with pytest.raises(ValueError, match="call begin_step before each accumulate"):
        engine.accumulate(tokens_of(0))
    engine.begin_step(RATE)
    with pytest.raises(ValueError, match=flag + ".*1 rank and 2 micro-batches"):
        engine.accumulate(tokens_of(0), micro_batches=2)
    engine.accumulate(tokens_of(0))
    with pytest.raises(ValueError, match="call begin_step before each accumulate"):
        engine.accumulate(tokens_of(0))
    with pytest.raises(ValueError, match=r"learning_rate .*the backward has stepped at"):
        engine.step(2 * RATE)
    with pytest.raises(ValueError, match=r"begin_step .*without --optimizer-in-backward"):
        engine_in(OptimizerConfig()).begin_step(RATE)


class Detached(torch.nn.Module):
    """Its backward reads the weight twice, the second time when the weight has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8, bias=False)

    def units(self) -> list[tuple[str, torch.nn.Module]]:
        return [("before", self.before), ("last", self.last)]

    def recomputed_units(self) -> list[range]:
        return []

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.before(inputs)
        weight = self.last.weight
        return (self.last(hidden @ weight.detach()) - targets).square().mean()


def test_a_backward_that_reads_weights_after_their_step_is_an_error() -> None:
    engine = megatron_zpp.ZeroEngine(
        Detached(), config=EngineConfig(optimizer=PLAIN), device=torch.device("cpu")
    )
    engine.begin_step(RATE)
    with pytest.raises(RuntimeError, match=r"last\.weight: is read while"):
        engine.accumulate((torch.randn(4, 8), torch.randn(4, 8)))


class Again(Detached):
    """The recomputation of `before` computes `last` again, when that has been stepped."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        both = lambda x: self.before(x + self.last(x).detach())  # noqa: E731
        hidden = torch.utils.checkpoint.checkpoint(both, inputs, use_reentrant=False)
        return (self.last(hidden) - targets).square().mean()


@pytest.mark.parametrize(
    ("stage", "said"), [(0, r"last\.weight: is read"), (3, "--optimizer-in-backward: of")]
)
def test_a_recomputation_of_a_unit_after_its_step_is_an_error(stage: int, said: str) -> None:
    config = EngineConfig(optimizer=PLAIN, zero=ZeroConfig(zero_stage=stage))
    engine = megatron_zpp.ZeroEngine(Again(), config=config, device=torch.device("cpu"))
    engine.begin_step(RATE)
    with pytest.raises(RuntimeError, match=f"^{said}"):
        engine.accumulate((torch.randn(4, 8), torch.randn(4, 8)))
