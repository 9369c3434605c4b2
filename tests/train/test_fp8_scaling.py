"""Delayed scaling in runs: equal scales on all ranks, on any grid, after a resume, and compiled."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.train.setup.device import prepare_device
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.model.variants import MODELS, flags_of
from tests.plan.test_memory import saved_bytes
from tests.support import logged, nightly
from tests.train.in_process import train_here
from tests.zero.ranks import on_ranks

DELAYED = "--bf16 --fp8 --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max".split()
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --kv-channels 16 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-3 --device cpu --hidden-dropout 0 --attention-dropout 0"
).split()


def engine_of(topology: Topology, *more: str) -> ZeroEngine:
    torch.set_num_threads(1)  # as each of several ranks has; sums of more threads have other bits
    config = parse_args([*FLAGS, *DELAYED, *more])
    return build_engine(config, 61, prepare_device(config, topology), topology)


def batch(step: int, data_rank: int) -> torch.Tensor:
    return torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(10 * step + data_rank))


def state_of(engine: ZeroEngine) -> dict[str, Any] | None:
    return engine.scaling.state()


def three_steps(engine: ZeroEngine, found: dict[str, Any] | None = None) -> list[float]:
    """Losses; `found` gets the rank's own maxima of the first step, and the state after it."""
    found, losses = {} if found is None else found, []
    for step in range(3):
        for index in range(2):
            loss = engine.accumulate(
                batch(step + 5 * index, engine.mesh.data_rank), index=index, micro_batches=2
            )
            losses.append(loss.item())
        if step == 0:
            found["own"] = engine.scaling.maxima().tolist()
        assert engine.step(1e-2).skipped == 0
        if step == 0:
            found["first"] = state_of(engine)
    return losses


def shared_scales(topology: Topology, directory: str, *more: str) -> dict[str, Any]:
    """Losses of three steps, and scales after them, after a skipped one and as saved."""
    engine = engine_of(topology, *more)
    rank = engine.mesh.data_rank
    found: dict[str, Any] = {}
    losses = three_steps(engine, found)
    found |= {"losses": losses, "state": state_of(engine)}
    # One rank's gradients are not finite: the step is skipped, and its maxima are forgotten on all ranks.
    engine.evaluate(batch(8, rank))
    weight = float("inf") if topology.rank == 0 else 1.0
    engine.accumulate(batch(9, rank), index=0, micro_batches=1, weight=weight)
    assert engine.step(1e-2).skipped == 1
    found["skipped"] = state_of(engine)
    save(Path(directory), engine)
    engine.close()
    return found


def largest_first(found: dict[str, Any]) -> torch.Tensor:
    """448 or 57344 over the scales after the first step: its maxima (L, 3)."""
    scales = torch.tensor([entry["scales"] for entry in found["first"].values()])
    return torch.tensor([448.0, 448.0, 57344.0]) / scales


@pytest.mark.parametrize("model", ["gpt2", nightly("llama")])
def test_ranks_have_equal_scales_and_any_grid_loads_them(model: str, tmp_path: Path) -> None:
    flags = flags_of(MODELS[model])
    alone = shared_scales(Topology(), str(tmp_path / "alone"), *flags)
    assert set(alone["state"]) == {
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in ("attention.qkv", "attention.output", "mlp.input", "mlp.output")
    }
    grids = [("data", "--zero-stage 3", ["--fp8-output-layer"])]
    if model == "llama":
        grids += [("context", "--context-parallel-size 2 --zero-stage 2 --cp-comm-type p2p", [])]
    for name, grid, more in (*grids, ("tensor", "--tensor-model-parallel-size 2 --zero-stage 1", [])):
        ranks = on_ranks(2, shared_scales, str(tmp_path / name), *flags, *grid.split(), *more)
        for found in ranks:
            assert found["skipped"] == found["state"] == ranks[0]["state"]
        own = torch.tensor([found["own"] for found in ranks])
        assert not torch.equal(own[0], own[1])
        expected = own.amax(0)
        if name == "data":
            assert list(ranks[0]["first"])[-1] == "head"
            expected[-1, 2] = 57344.0  # no scale but 1
        torch.testing.assert_close(largest_first(ranks[0]), expected, rtol=2**-22, atol=0)
        other = engine_of(Topology(), *flags, *more)
        load_checkpoint(tmp_path / name / "iter_0000005", other, TOKENIZER, with_optimizer=True)
        assert state_of(other) == ranks[0]["state"]
        other.close()
    tensor, one = (torch.tensor(found["losses"]) for found in (ranks[0], alone))
    far = (tensor - one).abs() / one
    assert far[:2].max() < 2**-10  # before the first step
    rounded = torch.stack([torch.tensor(losses_of_rounded(seed, *flags)) for seed in (1, 2)])
    assert (far <= 4 * ((rounded - one).abs() / one).amax(0).cummax(0).values).all()


def losses_of_rounded(seed: int, *more: str) -> list[float]:
    """Losses of `shared_scales` for weights that differ by about a rounding to bf16.

    Steps amplify such differences, and the sums of tensor ranks are rounded elsewhere.
    """
    engine, generator = engine_of(Topology(), *more), torch.Generator().manual_seed(seed)

    def move(index: int, elements: range, weights: torch.Tensor) -> None:
        weights.mul_(1 + 2**-9 * torch.randn(len(weights), generator=generator))

    engine.states.fill("weights", move)
    losses = three_steps(engine)
    engine.close()
    return losses


def losses_of(path: Path) -> list[tuple[float, float]]:
    return list(zip(logged(path), logged(path, "grad_norm"), strict=True))


Run = Callable[..., list[tuple[float, float]]]


def resumed_exactly(
    directory: Path, flags: Sequence[str], *asked: str
) -> tuple[Run, list[tuple[float, float]]]:
    """A function that runs with more flags, by name, and what a run with those that are `asked` finds.

    Another one that is resumed in the directory `run`, and has evaluations, must find the same.
    """
    torch.set_num_threads(1)

    def run(name: str, *more: str) -> list[tuple[float, float]]:
        train_here([*flags, "--log-interval", "1", *more, "--metrics-file", str(directory / name)])
        return losses_of(directory / name)

    whole = run("whole", *asked, "--eval-iters", "0")
    saved = ["--save", str(directory / "run"), "--load", str(directory / "run")]
    evaluated = [*asked, *saved, "--eval-interval", "1", "--eval-iters", "1"]
    first = run("first", *evaluated, "--exit-interval", "2")
    assert [*first, *run("second", *evaluated)] == whole
    return run, whole


def test_a_resumed_run_and_one_with_evaluations_have_the_same_bits(tmp_path: Path) -> None:
    flags = [*FLAGS, *DELAYED]
    run, _ = resumed_exactly(tmp_path, flags)
    # A run with other scales begins with those of its tensors.
    tensorwise = "--fp8-recipe tensorwise --fp8-amax-history-len".split()
    plain = [flag for flag in flags if flag not in DELAYED[2:]] + ["--fp8", "--fp8-recipe", tensorwise[1]]
    before = [*plain, "--save", str(tmp_path / "other"), "--eval-iters", "0", "--exit-interval", "2"]
    train_here(before)
    state = json.loads((tmp_path / "other" / "iter_0000002" / "state.json").read_text())
    assert state["product_scaling"] is None
    resumed = run("changed", "--load", str(tmp_path / "other"), "--eval-iters", "0")
    assert len(resumed) == 2


def check_graphs(topology: Topology, more: list[str]) -> None:
    """That runs with and without graphs have the same numbers, and what their first steps save."""
    found, saved = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        engine, said = engine_of(topology, *more), []
        model, scaling = engine.model, engine.scaling
        if compiled:
            compile_parts(
                model, (2, 16), said.append, "aot_eager", ready=lambda scaling=scaling: scaling.known
            )
        losses = []
        for step in range(3):
            losses.append(engine.evaluate(batch(7, 0)).item())
            take = partial(engine.accumulate, batch(step, 0), index=0, micro_batches=1)
            saved.append(
                saved_bytes(lambda take=take, to=losses: to.append(take().item()), model.parameters())
            )
            losses.append(engine.step(1e-2).grad_norm.item())
        found.append((losses, state_of(engine)))
        assert said == []
        engine.close()
    assert found[0] == found[1]
    assert saved[3] < 0.7 * saved[0]  # the first step of each


@pytest.mark.parametrize("more", [nightly([]), ["--fp8-param-gather"]], ids=str)
def test_one_graph_after_the_first_step(more: list[str]) -> None:
    """Compiled layers have the same numbers, and are compiled once, with evaluations before and between.

    A first step without graphs saves less than one of a run without any, as it computes layers again.
    """
    check_graphs(Topology(), more)


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", nightly("--context-parallel-size")])
def test_one_graph_of_ranks_that_share_layers_or_samples(flag: str) -> None:
    """They too compute layers again in the first step, and exchange what that needs."""
    on_ranks(2, check_graphs, [flag, "2", "--fp8-param-gather"])
