"""The engine against plain torch: same weights after the same batches."""

import dataclasses

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.topology import Topology

VOCAB = 101
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
CPU = torch.device("cpu")


def engine_of(
    model: ModelConfig = MODEL,
    optimizer: OptimizerConfig | None = None,
    precision: PrecisionConfig | None = None,
) -> ZeroEngine:
    return ZeroEngine(
        GPT(model, VOCAB).initialize(3),
        optimizer or OptimizerConfig(weight_decay=0.1),
        precision or PrecisionConfig(),
        Topology(),
        CPU,
    )


def batches(steps: int, micro_batches: int) -> torch.Tensor:
    """(steps, micro-batches, B, T + 1) ids."""
    return torch.randint(VOCAB, (steps, micro_batches, 3, 17), generator=torch.Generator().manual_seed(8))


def run(engine: ZeroEngine, data: torch.Tensor, learning_rate: float = 1e-2) -> list[float]:
    losses = []
    for step in data:
        parts = [
            engine.accumulate(tokens, micro_batches=len(step), last=index == len(step) - 1)
            for index, tokens in enumerate(step)
        ]
        losses.append(torch.stack(parts).mean().item())
        engine.step(learning_rate)
    return losses


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("untied", [False, True])
def test_twenty_steps_equal_torchs_adamw_on_the_whole_model(micro_batches: int, untied: bool) -> None:
    """A key bias has no gradient but rounding, which a tiny eps would blow up to full steps: eps is 1e-4."""
    config = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=untied)
    data = batches(20, micro_batches)
    engine = engine_of(config, OptimizerConfig(weight_decay=0.1, adam_eps=1e-4))
    losses = run(engine, data)

    model = GPT(config, VOCAB).initialize(3)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-4,
    )
    for step, loss in zip(data, losses, strict=True):
        whole = step.flatten(0, 1)
        expected = model(whole[:, :-1], whole[:, 1:])
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    initial = dict(GPT(config, VOCAB).initialize(3).named_parameters())
    for name, weight in model.named_parameters():
        moved = (weight - initial[name]).norm()
        # fp32 keeps 1e-7 of a gradient; sums over a backward and 20 steps lose two digits of that.
        assert (engine.weights()[name] - weight).norm() <= 1e-5 * moved, name


def test_gradient_norm_is_the_whole_models_and_padding_does_not_count() -> None:
    data = batches(1, 1)[0]
    engine = engine_of(optimizer=OptimizerConfig(clip_grad=0.0))
    engine.accumulate(data[0], micro_batches=1, last=True)
    model = GPT(MODEL, VOCAB).initialize(3)
    model(data[0][:, :-1], data[0][:, 1:]).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    assert engine.step(1e-3).grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_follows_fp32_within_its_rounding(dtype: str) -> None:
    precision = (
        PrecisionConfig(bf16=True) if dtype == "bfloat16" else PrecisionConfig(fp16=True, loss_scale=256.0)
    )
    data = batches(10, 2)
    exact, rounded = run(engine_of(), data), run(engine_of(precision=precision), data)
    # A mean of ~1e3 losses near ln(101): each is off by at most a few units in the last place of its format.
    tolerance = 8 * torch.finfo(getattr(torch, dtype)).eps
    assert exact == pytest.approx(rounded, rel=tolerance)
    assert engine_of(precision=precision).units[0].parameters.dtype == getattr(torch, dtype)


def test_master_weights_keep_what_bf16_would_lose() -> None:
    """Steps far below bf16's resolution of the weights must add up."""
    engine = engine_of(optimizer=OptimizerConfig(weight_decay=0.0), precision=PrecisionConfig(bf16=True))
    before = {name: weight.clone() for name, weight in engine.weights().items()}
    run(engine, batches(5, 1), learning_rate=1e-6)
    moved = torch.cat([(engine.weights()[name] - before[name]).abs().flatten() for name in before])
    assert 0 < moved.max() < 1e-5
    assert (moved > 0).float().mean() > 0.5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(poison: float) -> None:
    engine = engine_of()
    weights = {name: weight.clone() for name, weight in engine.weights().items()}
    engine.accumulate(batches(1, 1)[0, 0], micro_batches=1, last=True)
    engine.units[1].gradients[5] = poison
    assert engine.step(1e-2).skipped
    assert all(torch.equal(weights[name], weight) for name, weight in engine.weights().items())
    assert not engine.moments()
    assert run(engine, batches(3, 1)) == run(engine_of(), batches(3, 1))  # nothing of it is left behind


def test_fp16_overflow_lowers_the_scale_until_steps_succeed() -> None:
    engine = engine_of(precision=PrecisionConfig(fp16=True, initial_loss_scale=2.0**24, hysteresis=1))
    results = []
    for step in batches(30, 1):
        engine.accumulate(step[0], micro_batches=1, last=True)
        results.append(engine.step(1e-3))
    assert results[0].skipped
    assert not results[-1].skipped
    assert results[-1].loss_scale < 2.0**24


def test_parameters_are_aligned_views_of_their_units_buffer() -> None:
    engine = engine_of(precision=PrecisionConfig(bf16=True))
    units = {id(unit.parameters.untyped_storage()): unit for unit in engine.units}
    starts = {unit.parameters.untyped_storage().data_ptr() for unit in engine.units}
    assert len(units) == len(engine.units) == 4
    for parameter in engine.model.parameters():
        assert parameter.untyped_storage().data_ptr() in starts
        assert parameter.storage_offset() * parameter.element_size() % 256 == 0


def test_evaluation_has_no_dropout_and_leaves_no_gradient() -> None:
    engine = engine_of(dataclasses.replace(MODEL, hidden_dropout=0.5, attention_dropout=0.5))
    tokens = batches(1, 1)[0, 0]
    assert engine.evaluate(tokens) == engine.evaluate(tokens)
    assert engine.accumulate(tokens, micro_batches=1, last=True) != engine.evaluate(tokens)
