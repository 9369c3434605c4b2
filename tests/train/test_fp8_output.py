"""Runs with --fp8-output-layer: exact resumes, equal stages, other flags, and what it does not go with."""

import json
from pathlib import Path

import pytest
import torch

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.fp8.output import OutputProduct
from tests.model.variants import MODELS, flags_of
from tests.support import nightly
from tests.train.test_fp8_scaling import (
    DELAYED,
    FLAGS,
    batch,
    engine_of,
    resumed_exactly,
    state_of,
    three_steps,
)
from tests.zero.ranks import on_ranks

OUTPUT, HELD = "--fp8-output-layer", "--fp8-param-gather"
TENSOR, UNTIED = "--tensor-model-parallel-size 2", "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize("more", [[], [HELD, UNTIED, *flags_of(MODELS["llama"])]], ids=str)
def test_stages_have_the_same_bits_and_layers_other_ones(more: list[str]) -> None:
    """Of one rank, and so have halves of layers; the output layer has scales of hidden states and table."""
    found = []
    for where in ("--zero-stage 0", "--zero-stage 3", "--zero-stage 3 --zero-unit sublayer"):
        engine = engine_of(Topology(), OUTPUT, *more, *where.split())
        found.append(three_steps(engine))
        model = engine.model
        assert isinstance(model.head.product, OutputProduct)
        assert model.head.product.codes is None
        state = state_of(engine)
        hidden, table, gradient = state["head"]["scales"]
        assert hidden != 1.0
        assert table != 1.0
        assert gradient == 1.0  # of no use
        before = engine.evaluate(batch(8, 0)).item()
        logits = model(batch(8, 0)[:, :-1])  # 16-bit products
        wide = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch(8, 0)[:, 1:].flatten())
        assert before != wide.item()
        assert before == pytest.approx(wide.item(), rel=2.0**-6)
        engine.close()
    assert found[0] == found[1] == found[2]
    engine = engine_of(Topology(), *more)
    layers = three_steps(engine)
    engine.close()
    assert layers != found[0]
    assert layers == pytest.approx(found[0], rel=2.0**-6)


EXACT = [
    "--zero-stage 2",
    "--zero-stage 3 --zero-hpz-partition-size auto",
    "--zero-stage 3 --zero-prefetch-units 0 --recompute-granularity full --recompute-method uniform",
]
QUANTIZED = [
    "--zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size auto",
    "--zero-stage 3 --zero-quantized-gradients",
]


def beside_zeropp(topology: Topology) -> list[list[float]]:
    """Losses of three steps of a rank and of an evaluation: of EXACT, of QUANTIZED, and without the flag."""
    found = []
    for case in (*(f"{OUTPUT} {flags}" for flags in (*EXACT, *QUANTIZED)), EXACT[0]):
        engine = engine_of(topology, *case.split())
        found.append([*three_steps(engine), engine.evaluate(batch(8, 0)).item()])
        engine.close()
    return found


def test_stages_hpz_and_recomputation_have_the_same_bits_on_two_nodes() -> None:
    """Of two ranks each; with quantised messages, or without the flag, about the same losses."""
    for *exact, weights, gradients, layers in on_ranks(4, beside_zeropp, ranks_per_node=2):
        assert all(losses == exact[0] for losses in exact)
        for other in (weights, gradients, layers):
            assert other != exact[0]
        assert weights == pytest.approx(exact[0], rel=0.02)
        assert gradients == pytest.approx(exact[0], rel=0.05)  # in 4 bits
        assert layers == pytest.approx(exact[0], rel=0.02)


@pytest.mark.parametrize("more", [nightly([]), [HELD]], ids=str)
def test_a_resumed_run_has_the_same_bits_and_may_change_the_flag(tmp_path: Path, more: list[str]) -> None:
    run, whole = resumed_exactly(tmp_path, [*FLAGS, *DELAYED, *more], OUTPUT)
    state = json.loads((tmp_path / "run" / "iter_0000002" / "state.json").read_text())["product_scaling"]
    assert "head" in state
    without = run("without", "--load", str(tmp_path / "run"), "--ckpt-step", "2", "--eval-iters", "0")
    run("plain", "--save", str(tmp_path / "other"), "--eval-iters", "0", "--exit-interval", "2")
    begun = run("begun", "--load", str(tmp_path / "other"), OUTPUT, "--eval-iters", "0")
    for changed in (without, begun):
        assert len(changed) == 2
        assert changed != whole[2:]
        assert [loss for loss, _ in changed] == pytest.approx([loss for loss, _ in whole[2:]], rel=2.0**-6)


def of_tensor_ranks(topology: Topology, *more: str) -> list[float]:
    engine = engine_of(topology, OUTPUT, *more)
    losses = three_steps(engine)
    assert "head" in (state_of(engine) or {})
    engine.close()
    return losses


@pytest.mark.parametrize("more", [(), nightly((HELD, UNTIED))], ids=str)
def test_tensor_ranks_multiply_their_entries(more: tuple[str, ...]) -> None:
    """Before the first step the losses are one rank's but for the scales of parts; later they stay near."""
    alone = of_tensor_ranks(Topology(), *more)
    here, other = on_ranks(2, of_tensor_ranks, *TENSOR.split(), *more)
    assert here == other
    assert here[:2] == pytest.approx(alone[:2], rel=2.0**-10)
    assert here == pytest.approx(alone, rel=2.0**-6)
