"""Compiled layers that tensor ranks share, and runs of the program with them."""

import json
from pathlib import Path

import pytest
import torch

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.train.setup.device import prepare_device
from tests.support import nightly, pretrain
from tests.zero.ranks import on_ranks
from tests.zero.test_tensor_parallel import (
    GPT_2,
    VOCAB,
    Case,
    Trained,
    build,
    check,
    train_engine,
)

BATCH, LENGTH, WIDTH = 4, GPT_2.seq_length, GPT_2.hidden_size
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--train-iters 6 --log-interval 1 --eval-interval 3 --eval-iters 1 --device cpu --hidden-dropout 0 "
    "--attention-dropout 0"
).split()


def saved_shapes(topology: Topology, model: str, overlapped: bool) -> list[tuple[int, ...]]:
    """The shapes of what a compiled forward keeps for the backward, each memory once."""
    torch.set_num_threads(1)
    engine = build(Case(model, 2, 0, overlapped=overlapped), topology)
    said: list[str] = []
    compile_parts(engine.model, (BATCH, LENGTH), said.append, backend="aot_eager_decomp_partition")
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    engine.accumulate(tokens, index=0, micro_batches=1)
    engine.step(1e-3)
    kept: dict[int, tuple[int, ...]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine.model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
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
    torch.set_num_threads(1)
    engine = build(case, topology)
    said: list[str] = []
    compile_parts(engine.model, (BATCH, LENGTH), said.append, backend="aot_eager_decomp_partition")
    found = train_engine(engine, case)
    assert said == []
    return found


def test_graphs_compute_beside_exchanges_and_learn_what_one_process_does() -> None:
    case = Case("gpt2", 2, 0, overlapped=True)
    check(case, on_ranks(2, compiled, case)[0], rel=1e-6)


def losses(file: Path) -> list[float]:
    records = map(json.loads, file.read_text().splitlines())
    return [record["lm_loss"] for record in records if "lm_loss" in record]  # others are evaluations


@pytest.mark.parametrize(
    "more", ["", "--sample-prompt 7 --sample-tokens 3 --position-embedding-type rope --swiglu"]
)
def test_a_run_learns_what_one_rank_does(more: str, tmp_path: Path) -> None:
    """Same samples in the same order, with data ranks beside tensor ranks, ZeRO and compiled layers."""
    runs = {1: (), 4: ("--tensor-model-parallel-size", "2", "--zero-stage", "3")}
    for ranks, flags in runs.items():
        file = tmp_path / f"{ranks}.jsonl"
        done = pretrain(*FLAGS, *more.split(), *flags, "--metrics-file", str(file), processes=ranks)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "4.jsonl") == pytest.approx(losses(tmp_path / "1.jsonl"), rel=1e-6)
    assert "2 data ranks × 2 tensor ranks" in done.stdout


@pytest.mark.nightly
def test_the_order_of_samples_survives_a_change_of_tensor_ranks(tmp_path: Path) -> None:
    """Saved by 2 data × 2 tensor ranks; 1 rank, 4 tensor ranks or 4 data ranks continue with equal losses."""
    save = ["--save", str(tmp_path / "whole"), "--save-interval", "3"]
    shared = ["--tensor-model-parallel-size", "2", "--zero-stage", "3"]
    file = tmp_path / "whole.jsonl"
    assert pretrain(*FLAGS, *save, *shared, "--metrics-file", str(file), processes=4).returncode == 0
    expected = losses(file)
    for ranks, flags in (
        (1, ()),
        (4, ("--tensor-model-parallel-size", "4")),
        (4, ("--zero-stage", "1")),
        (2, ("--tensor-model-parallel-size", "2", "--zero-stage", "2")),
    ):
        resumed = tmp_path / f"{ranks}{len(flags)}{flags[-1:]}.jsonl"
        load = ["--load", str(tmp_path / "whole"), "--ckpt-step", "3", "--metrics-file", str(resumed)]
        done = pretrain(*FLAGS, *load, *flags, processes=ranks)
        assert done.returncode == 0, done.stderr
        assert losses(resumed) == pytest.approx(expected[3:], rel=1e-6)


def test_a_run_may_compute_beside_exchanges_and_resume_without(tmp_path: Path) -> None:
    """Two tensor ranks, with a text and an evaluation; one rank resumes the run."""
    run = [
        *FLAGS,
        "--sample-prompt",
        "7",
        "--sample-tokens",
        "3",
        "--save",
        str(tmp_path / "run"),
        "--save-interval",
        "3",
    ]
    resumed = ["--load", str(tmp_path / "run"), "--ckpt-step", "3", "--save", str(tmp_path / "other")]
    shared = ["--tensor-model-parallel-size", "2", "--zero-stage", "2"]
    for ranks, flags in ((2, shared), (1, resumed)):
        done = pretrain(*run, *flags, "--metrics-file", str(tmp_path / f"{ranks}.jsonl"), processes=ranks)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "1.jsonl") == pytest.approx(losses(tmp_path / "2.jsonl")[3:], rel=1e-6)


def test_a_resumed_run_drops_out_what_the_first_would_have(tmp_path: Path) -> None:
    """The masks of tensor ranks depend on the seed and consumed samples: equal losses, to the bit."""
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 4 --eval-iters 0".split()
    shared = [*FLAGS, *dropout, "--tensor-model-parallel-size", "2", "--zero-stage", "2"]
    first = [*shared, "--save", str(tmp_path / "run"), "--save-interval", "2"]
    resumed = [*shared, "--load", str(tmp_path / "run"), "--ckpt-step", "2"]
    for name, flags in (("first", first), ("resumed", resumed)):
        done = pretrain(*flags, "--metrics-file", str(tmp_path / name), processes=2)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "resumed") == losses(tmp_path / "first")[2:]


def shares(topology: Topology) -> list[tuple[bool, bool]]:
    """Whether an engine has a group that shares layers, and their splits: of one tensor rank, of two."""
    found = []
    for tensor in ("1", "2"):
        config = parse_args([*FLAGS, "--tensor-model-parallel-size", tensor])
        grid = Grid(topology, int(tensor))
        engine = build_engine(config, 251, prepare_device(config, grid), grid)
        found.append((engine.share.group is not None, bool(engine.share.splits)))
        engine.close()
    return found


def test_layers_are_shared_as_the_flag_says() -> None:
    assert on_ranks(2, shares) == [[(False, False), (True, True)]] * 2


@pytest.mark.nightly
def test_8_bit_products_of_shared_layers_learn_alike(tmp_path: Path) -> None:
    """Each rank scales its own part of a tensor, so that losses agree within the formats' rounding."""
    wide = ["--hidden-size", "64", "--bf16", "--fp8", "--train-iters", "3", "--eval-iters", "0"]
    runs = {1: (), 2: ("--tensor-model-parallel-size", "2", "--zero-stage", "1")}
    for ranks, flags in runs.items():
        file = ["--metrics-file", str(tmp_path / f"{ranks}.jsonl")]
        assert pretrain(*FLAGS, *wide, *flags, *file, processes=ranks).returncode == 0
    assert losses(tmp_path / "2.jsonl") == pytest.approx(losses(tmp_path / "1.jsonl"), rel=2**-8)


@pytest.mark.parametrize("stage", [nightly("0"), "3"])
def test_what_is_counted_over_ranks_counts_replicated_parameters_once(stage: str, tmp_path: Path) -> None:
    """Norms of weights, zero gradients and weighted losses are one rank's; so is a second learning rate."""
    asked = "--log-params-norm --log-num-zeros-in-grad --decoupled-lr 2e-3".split()
    asked += ["--calculate-per-token-loss", "--eod-mask-loss"]  # losses have weights with both
    runs = {1: (), 4: ("--tensor-model-parallel-size", "2", "--zero-stage", stage)}
    records = {}
    for ranks, flags in runs.items():
        file = tmp_path / f"{ranks}.jsonl"
        done = pretrain(*FLAGS, *asked, *flags, "--metrics-file", str(file), processes=ranks)
        assert done.returncode == 0, done.stderr
        found = map(json.loads, file.read_text().splitlines())
        records[ranks] = [record for record in found if "lm_loss" in record]
    for one, four in zip(records[1], records[4], strict=True):
        for key in ("lm_loss", "grad_norm", "params_norm"):
            assert four[key] == pytest.approx(one[key], rel=1e-6), key
        assert four["num_zeros"] == one["num_zeros"] > 0
