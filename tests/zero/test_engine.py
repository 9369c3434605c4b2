"""The engine against plain torch: same weights after the same batches."""

import dataclasses

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import keeps_gradient
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero.engines import engine_of, model_of, operations, same_bits, weights_of

VOCAB, RATE = 101, 3e-3
MODEL = model_of(hidden_size=32, num_attention_heads=4)


def batches(steps: int, micro_batches: int) -> torch.Tensor:
    """(steps, micro-batches, B, T + 1) ids."""
    return torch.randint(VOCAB, (steps, micro_batches, 3, 17), generator=torch.Generator().manual_seed(8))


def run(engine: ZeroEngine, data: torch.Tensor, learning_rate: float = 1e-2) -> list[float]:
    losses = []
    for step in data:
        parts = [
            engine.accumulate(tokens, index=index, micro_batches=len(step))
            for index, tokens in enumerate(step)
        ]
        losses.append(torch.stack(parts).mean().item())
        engine.step(learning_rate)
    return losses


def plain_torch(
    config: ModelConfig, data: torch.Tensor, dtype: torch.dtype
) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of torch's own AdamW on the whole batch, in one number format throughout."""
    model = GPT(config, VOCAB).initialize(3).to(dtype)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=RATE, eps=1e-4
    )
    losses = []
    for step in data:
        whole = step.flatten(0, 1)
        logits = model(whole[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("micro_batches", "untied"), [(1, False), (3, True)])
def test_twenty_steps_are_as_exact_as_torchs_adamw(micro_batches: int, untied: bool) -> None:
    """Compared with the same training in fp64: as close as plain fp32.

    A key bias has no gradient but rounding, which a tiny eps would blow up to full steps: eps is 1e-4. At a
    learning rate of 1e-2 training amplifies rounding tenfold, and the last bits of a product, which differ
    between processors, decide which of two runs is four times as far from fp64; at 3e-3 it does not.
    """
    config = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=untied)
    data = batches(20, micro_batches)
    engine = engine_of(config, VOCAB, optimizer=OptimizerConfig(weight_decay=0.1, adam_eps=1e-4))
    losses = run(engine, data, RATE)
    names = [name for name, _ in GPT(config, VOCAB).named_parameters()]
    weights = torch.cat([weights_of(engine)[name].double().flatten() for name in names])

    exact_losses, exact = plain_torch(config, data, torch.float64)
    _, rounded = plain_torch(config, data, torch.float32)
    assert losses == pytest.approx(exact_losses, rel=1e-6)
    assert (weights - exact).norm() <= 1.25 * (rounded - exact).norm()


@pytest.mark.parametrize(("stage", "untied"), [(0, False), (3, True)])
def test_gradients_of_long_micro_batches_are_plain_torchs(stage: int, untied: bool) -> None:
    """With so many tokens that the output layer computes its products in the forward."""
    config = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=untied)
    data = torch.randint(VOCAB, (2, 12, 17), generator=torch.Generator().manual_seed(8))
    assert not keeps_gradient(12 * 16, MODEL.hidden_size, 4)
    engine = engine_of(config, VOCAB, zero=ZeroConfig(zero_stage=stage))
    for index, tokens in enumerate(data):
        engine.accumulate(tokens, index=index, micro_batches=2)
    model, whole = GPT(config, VOCAB).initialize(3), data.flatten(0, 1)
    logits = model(whole[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for unit in engine.units:
        for name, found in zip(unit.names, unit.views(unit.gradient / 2), strict=True):  # a sum of two
            assert torch.allclose(found, gradients[name], rtol=1e-5, atol=1e-7), name


def test_master_weights_keep_what_bf16_would_lose() -> None:
    """Steps far below bf16's resolution of the weights must add up."""
    engine = engine_of(
        MODEL, VOCAB, optimizer=OptimizerConfig(weight_decay=0.0), precision=PrecisionConfig(bf16=True)
    )
    before = weights_of(engine)
    run(engine, batches(5, 1), learning_rate=1e-6)
    moved = torch.cat([(weights_of(engine)[name] - before[name]).abs().flatten() for name in before])
    assert 0 < moved.max() < 1e-5
    assert (moved > 0).float().mean() > 0.5


@pytest.mark.parametrize(("stage", "scale"), [(0, {"loss_scale": 64.0}), (2, {"initial_loss_scale": 64.0})])
def test_more_micro_batches_do_not_weaken_the_loss_scale(stage: int, scale: dict[str, float]) -> None:
    """64 equal micro-batches equal one, bit for bit, with many fp16 gradients near the smallest number.

    Dividing before the backward would leave a scale of 1, with which some of these gradients are zero.
    """
    precision, found = PrecisionConfig(fp16=True, **scale), []
    tokens = batches(1, 1)[0, 0, :1]
    for micro_batches in (1, 64):
        engine = engine_of(MODEL, VOCAB, zero=ZeroConfig(zero_stage=stage), precision=precision)
        for index in range(micro_batches):
            engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        found.append((engine.step(1e-3).grad_norm, weights_of(engine)))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


def test_parameters_are_aligned_views_of_their_units_buffer() -> None:
    engine = engine_of(MODEL, VOCAB, precision=PrecisionConfig(bf16=True))
    starts = {unit.full.untyped_storage().data_ptr() for unit in engine.units}
    assert len(starts) == len(engine.units) == 4
    for parameter in engine.model.parameters():
        assert parameter.untyped_storage().data_ptr() in starts
        assert parameter.storage_offset() * parameter.element_size() % 256 == 0


@pytest.mark.parametrize(
    ("stage", "precision", "large"),
    [
        (0, PrecisionConfig(bf16=True), 1),
        (3, PrecisionConfig(bf16=True), 2**23),
        (3, PrecisionConfig(fp16=True, loss_scale=1024.0), 1),
    ],
)
def test_gradients_that_need_no_sum_give_the_bits_of_those_that_are_summed(
    monkeypatch: pytest.MonkeyPatch, large: int, precision: PrecisionConfig, stage: int
) -> None:
    """One rank's only micro-batch goes to AdamW's kernel in 16 bits; in fp32 it is the same numbers.

    What is `large` is not copied first.
    """
    monkeypatch.setattr("megatron_zpp.zero.gradients.STEPPED_THERE", large)
    tokens, found = torch.randint(VOCAB, (3, 2, 9), generator=torch.Generator().manual_seed(2)), []
    for sums in (True, False):
        engine = engine_of(
            MODEL, VOCAB, zero=ZeroConfig(zero_stage=stage), precision=precision, operations=operations()
        )
        engine._gradients._sums = sums
        norms = []
        for part in tokens:
            engine.accumulate(part, index=0, micro_batches=1)
            expected = torch.float32 if sums else getattr(torch, precision.compute_dtype("cpu"))
            parts = [part.flat for unit in engine.units for part in unit.grad.segments]
            assert {part.dtype for part in parts} == {expected}
            assert (len(parts) > len(engine.units)) == (large == 1 and not sums)
            norms.append(engine.step(1e-2).grad_norm.item())
        found.append((norms, weights_of(engine)))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("setting", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_codes_need_operations(setting: str) -> None:
    with pytest.raises(ValueError, match=r"^operations None: .* load_operations\("):
        engine_of(MODEL, VOCAB, zero=ZeroConfig(zero_stage=3, **{setting: True}))


def test_a_load_writes_into_the_states_themselves_on_a_cpu() -> None:
    """A copy of every part would take most of the time of a load."""
    engine = engine_of(MODEL, VOCAB)
    memory, written = [], []

    def fill(unit: int, elements: range, target: torch.Tensor) -> None:
        written.append(target.untyped_storage().data_ptr())

    for kind in engine.states.kinds:
        memory += [shard.untyped_storage().data_ptr() for shard in engine.states.shards(kind)]
        engine.states.fill(kind, fill)
    assert written == memory
