"""Compiled layers that tensor or context ranks share, and runs of the program with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.loop import seed_dropout
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.train.setup.device import check_attention, prepare_device
from tests.support import nightly, recorded
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import of
from tests.zero.ranks import on_ranks
from tests.zero.test_context_parallel import case_of
from tests.zero.test_tensor_parallel import GPT_2, VOCAB, Case, Trained, build, check, train_engine

BATCH, LENGTH, WIDTH = 4, GPT_2.seq_length, GPT_2.hidden_size
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--train-iters 6 --log-interval 1 --eval-interval 3 --eval-iters 1 --device cpu --hidden-dropout 0 "
    "--attention-dropout 0"
).split()


def saved_shapes(topology: Topology, model: str, overlapped: bool) -> list[tuple[int, ...]]:
    """The shapes of what a compiled forward keeps for the backward, each memory once."""
    engine = build(Case(model, 2, 0, overlapped=overlapped), topology)
    said: list[str] = []
    compile_parts(engine.model, (BATCH, LENGTH), said.append, backend="aot_eager_decomp_partition")
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    engine.accumulate(tokens)
    engine.step(1e-3)
    kept: dict[int, tuple[int, ...]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.accumulate(tokens)
    assert said == []
    engine.close()
    return list(kept.values())


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "overlapped"), [("gpt2", False), ("llama", True)])
def test_a_graph_keeps_no_gathered_rows(model: str, overlapped: bool) -> None:
    """It would be enough to gather them once, but then every rank kept those of all ranks."""
    for shapes in on_ranks(2, saved_shapes, model, overlapped):
        assert shapes.count((BATCH * LENGTH // 2, WIDTH)) >= 4  # it was compiled for rows
        assert shapes.count((BATCH * LENGTH, WIDTH)) == 1  # the head's


def compiled(topology: Topology, case: Case) -> Trained:
    """As `train`, with graphs."""
    engine = build(case, topology)
    said: list[str] = []
    backend = "aot_eager_decomp_partition"
    compile_parts(engine.model, (BATCH, case.tokens), said.append, backend, masked=case.documents)
    found = train_engine(engine, case)
    assert said == []
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", 2, 0, overlapped=True),
        nightly(Case("olmo2", 2, 0, overlapped=True)),
        case_of("gpt2", 1, 0, 2, "a2a"),
        nightly(case_of("scores", 1, 3, 2, "a2a")),
        nightly(case_of("wide", 1, 1, 2, "p2p", recompute="full")),
        nightly(case_of("scores", 1, 1, 2, "p2p", documents=True)),
        nightly(case_of("llama", 2, 0, 2, "a2a", documents=True, overlapped=True)),
    ],
    ids=lambda case: f"{case.model}-{case.tensor}-{case.comm}",
)
def test_graphs_compute_beside_exchanges_and_learn_what_one_process_does(case: Case) -> None:
    check(case, on_ranks(case.tensor * case.context, compiled, case)[0], rel=1e-6)


def trained(ranks: int, file: Path, *flags: str) -> tuple[list[dict[str, Any]], str]:
    """The records of the steps of a run, and what it said."""
    return recorded(file, *FLAGS, *flags, processes=ranks)


@pytest.mark.parametrize("stage", [nightly("0"), "3"])
def test_a_run_learns_what_one_rank_does(stage: str, tmp_path: Path) -> None:
    """Same samples in the same order, with data ranks beside tensor ranks.

    Norms of weights and weighted losses count replicated parameters once; so do further learning rates.
    """
    flags = "--position-embedding-type rope --swiglu --log-params-norm --decoupled-lr 2e-3".split()
    flags += "--use-mup --mup-base-hidden-size 16 --calculate-per-token-loss --eod-mask-loss".split()
    shared = ["--tensor-model-parallel-size", "2", "--zero-stage", stage]
    flags += ["--final-logit-softcapping", "2", "--z-loss-coeff", "0.01"]
    alone, _ = trained(1, tmp_path / "1", *flags)
    four, said = trained(4, tmp_path / "4", *flags, *shared)
    assert "2 data ranks × 2 tensor ranks" in said
    assert "| params norm: " in said
    for key in ("lm_loss", "z_loss", "grad_norm", "params_norm"):
        assert of(four, key) == pytest.approx(of(alone, key), rel=1e-6), key


ACROSS = "--qk-layernorm --qk-layernorm-across-heads --embed-layernorm"
MUON = "--position-embedding-type rope --swiglu --optimizer muon"


@pytest.mark.parametrize(
    ("shared", "more"),
    [
        nightly("--tensor-model-parallel-size 2", ACROSS),
        ("--context-parallel-size 2 --cp-comm-type p2p", f"{MUON} --eod-mask-loss --z-loss-coeff 0.01"),
        nightly("--context-parallel-size 2", f"{MUON} --eod-mask-loss --calculate-per-token-loss"),
    ],
)
def test_a_run_of_two_ranks_is_resumed_by_one_rank(shared: str, more: str, tmp_path: Path) -> None:
    """Two tensor or context ranks, with a text, an evaluation, shared gains of heads, or a masked loss."""
    run, text = str(tmp_path / "run"), f"--sample-prompt 7 --save-interval 3 {more}".split()
    first, said = trained(2, tmp_path / "2", *text, "--save", run, *shared.split(), "--zero-stage", "2")
    assert f"1 data rank × 2 {shared.split('-')[2]} ranks" in said
    load = ["--load", run, "--ckpt-step", "3", "--save", str(tmp_path / "other")]
    resumed, again = trained(1, tmp_path / "1", *text, *load)
    for key in ("lm_loss", "grad_norm"):
        assert of(resumed, key) == pytest.approx(of(first, key)[3:], rel=1e-5 if key == "grad_norm" else 1e-6)
    texts = [[line for line in each.splitlines() if " text at iteration 6" in line] for each in (said, again)]
    assert texts[0] == texts[1]


def test_masks_of_dropout_depend_on_seed_sample_and_tensor_rank_alone() -> None:
    def mask(*arguments: int) -> list[float]:
        seed_dropout(*arguments, torch.device("cpu"))
        return torch.rand(4).tolist()

    assert mask(7, 3, 0) == mask(7, 3, 0)
    assert len({tuple(mask(*each)) for each in ((7, 3, 0), (7, 3, 1), (7, 3, 2), (7, 4, 0), (8, 3, 0))}) == 5


@pytest.mark.parametrize(("comm", "tensor", "tokens"), [("a2a", 1, 16), ("p2p", 1, 4), ("auto", 4, 4)])
def test_the_trial_of_attention_takes_what_a_rank_attends_to_at_once(
    comm: str, tensor: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole samples, or one of the four chunks of 16 tokens where keys go around a ring."""
    shared = f"--context-parallel-size 2 --cp-comm-type {comm} --tensor-model-parallel-size {tensor}"
    config, tried = parse_args([*FLAGS, *shared.split()]), []
    monkeypatch.setattr(
        "megatron_zpp.train.setup.device.check_runs", lambda *given, **_: tried.extend(given[2])
    )
    check_attention(config, prepare_device(config, Topology(0, 8, 0, 8)))
    assert tried == [tokens]


@pytest.mark.nightly
def test_8_bit_products_of_shared_layers_learn_alike(tmp_path: Path) -> None:
    """Each rank scales its own part of a tensor, so that losses agree within the formats' rounding."""
    wide = "--hidden-size 64 --bf16 --fp8 --train-iters 3 --eval-iters 0".split()
    alone, _ = trained(1, tmp_path / "1", *wide)
    shared, said = trained(2, tmp_path / "2", *wide, "--tensor-model-parallel-size", "2", "--zero-stage", "1")
    assert "CPU, bfloat16 with 8-bit products, ZeRO stage" in said
    assert of(shared, "lm_loss") == pytest.approx(of(alone, "lm_loss"), rel=2**-8)


def test_halves_of_layers_and_tables_have_their_rates_beside_muon() -> None:
    """Tables have the decoupled one, as all parameters that Muon does not train."""
    line = "--mock-data --train-iters 1 --device cpu --optimizer muon --decoupled-lr 1e-3".split()
    line += "--untie-embeddings-and-output-weights --zero-unit sublayer".split()
    config = parse_args([*BYTES, *TINY, *line])
    engine = build_engine(config, 257, prepare_device(config, Topology()), Topology())
    for unit in engine.units:
        for placement in unit.layout.placements:
            assert placement.decoupled != bool(placement.matrices), placement.name
    halves = [unit for unit in engine.units if unit.names[0].startswith("layers.")]
    assert len(halves) == 2 * config.model.num_layers
