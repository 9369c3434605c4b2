"""AdamW's states in fewer bytes on the engine: every stage, accumulation, messages, resuming, conversion."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.adamw import TorchAdamW
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero.engines import all_states, engine_of, model_of, operations, weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import QWZ

MODEL = model_of()
BF16 = PrecisionConfig(bf16=True)
FORMS = {
    "fp8": ("fp8", "fp8", "fp32"),
    "bf16, fp16": ("bf16", "fp16", "fp32"),
    "bf16+8": ("fp8", "fp8", "bf16+8"),
}


def optimizer(first: str, second: str, weights: str) -> OptimizerConfig:
    return OptimizerConfig(
        weight_decay=0.1,
        use_precision_aware_optimizer=True,
        exp_avg_dtype=first,  # type: ignore[arg-type]
        exp_avg_sq_dtype=second,  # type: ignore[arg-type]
        main_params_dtype=weights,  # type: ignore[arg-type]
    )


def engine_in(forms: str, topology: Topology | None = None, seed: int = 3, **zero: Any) -> ZeroEngine:
    chosen = OptimizerConfig(weight_decay=0.1) if forms == "fp32" else optimizer(*FORMS[forms])
    return engine_of(
        MODEL,
        101,
        zero=ZeroConfig(**zero),
        optimizer=chosen,
        precision=BF16,
        topology=topology,
        operations=operations(),
        seed=seed,
    )


def train(engine: ZeroEngine, steps: int, micro_batches: int = 1, begin: int = 0) -> list[float]:
    """Losses of steps in which all ranks have the same samples, so that sums of gradients are exact."""
    found = []
    for step in range(begin, begin + steps):
        generator = torch.Generator().manual_seed(step)
        for index in range(micro_batches):
            tokens = torch.randint(101, (2, 17), generator=generator) % 11
            loss = engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        engine.step(1e-2)
        found.append(loss.item())
    return found


def bits_of(engine: ZeroEngine) -> dict[str, list[float]]:
    return {name: values.flatten().tolist() for name, values in all_states(engine).items()}


@pytest.mark.parametrize("forms", FORMS)
def test_losses_are_those_of_fp32_states_but_for_rounding(forms: str) -> None:
    engine = engine_in(forms)
    ours, plain = train(engine, 12, 2), train(engine_in("fp32"), 12, 2)
    assert ours != plain
    assert ours[-1] < 0.6 * ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0.02, atol=0)
    for unit in engine.units:
        weights = unit.weights.decoded()
        assert not any(weights[gap].any() for gap in unit.layout.gaps_in(unit.owned))
        assert torch.equal(unit.gather_source.float(), unit.full[: len(unit.owned)].float())


def at_stages(
    topology: Topology, forms: str, stages: Sequence[int], micro_batches: int
) -> list[dict[str, list[float]]]:
    found = []
    for stage in stages:
        engine = engine_in(forms, topology, zero_stage=stage)
        train(engine, 3, micro_batches)
        found.append(bits_of(engine))
        engine.close()
    return found


@pytest.mark.parametrize("micro_batches", [1, nightly(2)])
@pytest.mark.parametrize("forms", FORMS)
def test_rounding_does_not_depend_on_the_shards(forms: str, micro_batches: int) -> None:
    """Two ranks with equal gradients have the states of one rank, bit for bit, at every stage."""
    one = at_stages(Topology(), forms, [0], micro_batches)
    for found in on_ranks(2, at_stages, forms, range(4), micro_batches):
        assert found == one * 4


@pytest.mark.parametrize("forms", FORMS)
def test_a_loaded_engine_continues_bit_for_bit(tmp_path: Path, forms: str) -> None:
    """At stage 0, and at another one; the files have the codes, and readers see fp32."""
    engine = engine_in(forms)
    train(engine, 3)
    path = save(tmp_path, engine)
    with CheckpointReader(path) as reader:
        for name, weight in weights_of(engine).items():
            assert torch.equal(reader.parameters()[name], weight)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    held = {"fp8": 6 + 2 / 128, "bf16, fp16": 8 + 1 / 128, "bf16+8": 5 + 2 / 128}[forms]
    assert size == pytest.approx(held * sum(unit.layout.numel for unit in engine.units), rel=0.05)
    for stage in (0, 3):
        other = loaded_from(path, forms, zero_stage=stage)
        assert bits_of(other) == bits_of(engine)
        assert train(other, 3, begin=3) == train(loaded_from(path, forms), 3, begin=3)
    assert train(engine, 3, begin=3) == train(loaded_from(path, forms), 3, begin=3)


def loaded_from(path: Path, forms: str, topology: Topology | None = None, **zero: Any) -> ZeroEngine:
    engine = engine_in(forms, topology, seed=99, **zero)
    load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
    return engine


def test_checkpoints_are_exchangeable(tmp_path: Path) -> None:
    """Every form loads every other one, rounded to the nearest number, and trains on."""
    paths, saved = {}, {}
    for forms in ("fp32", *FORMS):
        engine = engine_in(forms)
        train(engine, 3)
        paths[forms], saved[forms] = save(tmp_path / forms, engine), bits_of(engine)
    for source, path in paths.items():
        exact = loaded_from(path, "fp32")
        assert bits_of(exact) == saved[source]
        for target in FORMS:
            found = bits_of(engine := loaded_from(path, target, zero_stage=1))
            for name, values in saved[source].items():
                bound = {"weights": 2.0**-16, "exp_avg": 0.07, "exp_avg_sq": 0.07}[name.split("/")[0]]
                theirs, ours = torch.tensor(values), torch.tensor(found[name])
                assert ((ours - theirs).abs() <= bound * theirs.abs() + 2e-3 * theirs.abs().max()).all()
            assert train(engine, 2, begin=3)[-1] < 4.5


@pytest.mark.parametrize("format", ["int8", "delta4"])
def test_moments_go_with_weights_in_messages(format: str) -> None:
    """qwZ encodes fp32 weights: with int8 codes after the step, with differences as without it."""
    zero = QWZ | {"zero_stage": 3, "zero_quantized_weights_format": format}
    for losses in on_ranks(2, with_messages, zero, ranks_per_node=1):
        ours, plain = losses
        assert ours != plain
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0.02, atol=0)


def with_messages(topology: Topology, zero: dict[str, Any]) -> list[list[float]]:
    found = []
    for forms in ("fp8", "fp32"):
        engine = engine_in(forms, topology, **zero)
        found.append(train(engine, 6, 2))
        engine.close()
    return found


def test_what_cannot_be_right_is_refused() -> None:
    split = optimizer("fp32", "fp32", "bf16+8")
    for options, said in (
        ({"precision": PrecisionConfig(fp16=True)}, "needs --bf16; this run computes in float16"),
        ({"precision": PrecisionConfig()}, "needs --bf16; this run computes in float32"),
        ({"zero": ZeroConfig(zero_offload_optimizer=True)}, "omit --zero-offload-optimizer"),
        ({"zero": ZeroConfig(zero_stage=3, zero_quantized_weights=True)}, "omit --zero-quantized-weights"),
        ({"operations": None}, "needs the project's AdamW"),
        ({"rule": TorchAdamW(split)}, "needs the project's AdamW"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_of(
                MODEL, 101, optimizer=split, **{"precision": BF16, "operations": operations()} | options
            )
