"""Checkpoints of any tensor ranks, data ranks and stage load at any other, and training continues."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint, saved_settings
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.same_model import TABLES
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import REFERENCE, WEIGHTS
from tests.checkpoint.saving import FIRST, TOKENIZER, digest, digests, save
from tests.support import nightly
from tests.zero.engines import engine_of, operations
from tests.zero.ranks import on_ranks
from tests.zero.test_tensor_parallel import MODELS, VOCAB

SAMPLES, BEFORE, AFTER = 4, 3, 2  # per step; steps before the save and after it
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=256.0, loss_scale_window=2)
DELTA4 = {
    "zero_quantized_weights": True,
    "zero_quantized_weights_format": "delta4",
    "zero_hpz_partition_size": "auto",
}


@dataclass(frozen=True)
class Case:
    """An engine, and the directory where its run is saved or was saved by another one."""

    directory: str
    model: str = "gpt2"
    tensor: int = 1
    stage: int = 0
    precision: PrecisionConfig = PrecisionConfig(fp32=True)
    delta4: bool = False
    multiple: int = 128  # of the rows of the tables

    @property
    def path(self) -> Path:
        return Path(self.directory) / "iter_0000005"


@dataclass(frozen=True)
class Continued:
    """Hashes of states by kind and name, when saved or loaded, and losses and norms from there on."""

    states: dict[str, str]
    optimizer_steps: int
    loss_scale: dict[str, float]
    losses: list[float]
    norms: list[float]


def build(case: Case, topology: Topology, *, seed: int) -> ZeroEngine:
    return engine_of(
        replace(MODELS[case.model], make_vocab_size_divisible_by=case.multiple),
        VOCAB,
        seed=seed,
        zero=ZeroConfig(zero_stage=case.stage, **(DELTA4 if case.delta4 else {})),
        precision=case.precision,
        topology=topology,
        tensor=case.tensor,
        operations=operations() if case.delta4 else None,
    )


def train(engine: ZeroEngine, steps: range) -> tuple[list[float], list[float]]:
    """Mean losses and gradient norms of steps on the same samples, whatever the ranks."""
    mesh, losses, norms = engine.mesh, [], []
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        samples = torch.randint(VOCAB, (SAMPLES, 13), generator=generator)
        loss = engine.accumulate(samples[mesh.data_rank :: mesh.data_ranks], index=0, micro_batches=1)
        norms.append(engine.step(1e-3).grad_norm.item())
        losses.append(engine.mean_over_ranks(loss).item())
    return losses, norms


def continued(engine: ZeroEngine) -> Continued:
    """What the engine has, and how it continues."""
    has = digests(engine), engine.states.optimizer_steps, engine.loss_scale.state()
    found = Continued(*has, *train(engine, range(BEFORE, BEFORE + AFTER)))
    engine.close()
    return found


def save_runs(topology: Topology, cases: Iterable[Case]) -> list[Continued]:
    found = []
    for case in cases:
        engine = build(case, topology, seed=3)
        train(engine, range(BEFORE))
        save(Path(case.directory), engine, config={"model": asdict(engine.model.config)})
        found.append(continued(engine))
    return found


def resume_runs(topology: Topology, cases: Iterable[Case]) -> list[Continued]:
    found = []
    for case in cases:
        engine = build(case, topology, seed=99)
        assert load_checkpoint(case.path, engine, TOKENIZER, with_optimizer=True) == FIRST
        for kind in engine.states.kinds:
            for unit, shard in zip(engine.units, engine.states.shards(kind), strict=True):
                gaps = unit.layout.gaps_in(unit.layout.shard(engine.mesh))
                assert not any(shard[gap].any() for gap in gaps), "gaps are zero"
        found.append(continued(engine))
    return found


def check(runs: list[Continued], saved: Iterable[Continued], *, exact: bool = False) -> None:
    for ours, theirs in zip(runs, saved, strict=True):
        assert ours.states == theirs.states
        assert (ours.optimizer_steps, ours.loss_scale) == (theirs.optimizer_steps, theirs.loss_scale)
        of_fp16 = theirs.loss_scale["scale"] != 1  # whose sums over ranks are rounded
        for found, expected, close in (
            (ours.losses, theirs.losses, 1e-3 if of_fp16 else 1e-6),
            (ours.norms, theirs.norms, 1e-2 if of_fp16 else 1e-5),
        ):
            assert found == (expected if exact else pytest.approx(expected, rel=close))


def check_parameters(case: Case, saved: Continued) -> None:
    """One process reads the whole weights."""
    with CheckpointReader(case.path) as reader:
        parameters = reader.parameters()
    weights = {name: value for name, value in saved.states.items() if name.startswith(WEIGHTS)}
    rows = {name: VOCAB if name in TABLES else len(whole) for name, whole in parameters.items()}
    assert {f"{WEIGHTS}/{n}": digest(whole[: rows[n]]) for n, whole in parameters.items()} == weights


def test_runs_resume_at_any_number_of_tensor_ranks(tmp_path: Path) -> None:
    """From two of them with two data ranks each, and from four data ranks, with a loss scale that changed.

    At stage 0 every rank has all states, and saves a part of them.
    """
    cases = [Case(str(tmp_path / "gpt2"), "gpt2", 2, 1), Case(str(tmp_path / "llama"), "llama", 2, 3)]
    cases += [Case(str(tmp_path / "whole"), "gpt2", 1, 2, FP16), Case(str(tmp_path / "alike"), "gpt2", 1, 0)]
    saved = on_ranks(4, save_runs, cases)[0]

    def moved(tensor: int, *stages: int) -> list[Case]:
        return [replace(case, tensor=tensor, stage=stage) for case, stage in zip(cases, stages, strict=True)]

    for case, run in zip(cases, saved, strict=True):
        assert saved_settings(case.path)[1] == 4 // case.tensor  # data ranks
        check_parameters(case, run)
    assert saved[2].loss_scale["scale"] != 256.0
    check(on_ranks(1, resume_runs, moved(1, 3, 0, 1, 2))[0], saved)
    check(on_ranks(2, resume_runs, moved(2, 0, 2, 3, 1))[0], saved)
    mixed = [*moved(4, 3, 2, 1, 1)[:2], *moved(1, 0, 1, 2, 3)]
    found = on_ranks(4, resume_runs, mixed + cases)[0]
    check(found[:6], saved[:2] + saved)
    check(found[6:], saved, exact=True)


@pytest.mark.nightly
@pytest.mark.parametrize("local", [2, nightly(4)])
def test_references_of_weight_differences_move_between_grids(tmp_path: Path, local: int) -> None:
    """From two nodes with one or two data ranks of two tensor ranks each, to nodes without tensor ranks."""
    cases = [Case(str(tmp_path / model), model, 2, 3, PrecisionConfig(bf16=True), True) for model in MODELS]
    saved = on_ranks(2 * local, save_runs, cases, ranks_per_node=local)[0]
    assert any(name.startswith(REFERENCE) for name in saved[0].states)
    check(on_ranks(2 * local, resume_runs, cases, ranks_per_node=local)[0], saved, exact=True)
    for world, per_node in ((4, 2), (2, 1)):
        moved = [Case(case.directory, case.model, 1, 3, case.precision, True) for case in cases]
        found: list[Any] = on_ranks(world, resume_runs, moved, ranks_per_node=per_node)[0]
        for ours, theirs in zip(found, saved, strict=True):
            assert (ours.states, ours.optimizer_steps) == (theirs.states, theirs.optimizer_steps)
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-2)  # bf16, and other blocks of codes


@pytest.mark.parametrize(("model", "multiple", "tensor"), [nightly("gpt2", 1, 1), ("llama", 130, 2)])
def test_a_vocabulary_may_be_padded_to_another_multiple(
    tmp_path: Path, model: str, multiple: int, tensor: int
) -> None:
    """So that any number of tensor ranks can share it: to more rows and fewer."""
    case = Case(str(tmp_path), model, tensor, stage=3, multiple=multiple)
    saved = on_ranks(tensor, save_runs, [case])[0]
    alone = [replace(case, tensor=1, multiple=each) for each in (384, 7)]
    check(on_ranks(1, resume_runs, alone)[0], saved * 2)
    shared = [replace(case, tensor=2, stage=stage, multiple=each) for each, stage in ((384, 3), (2, 1))]
    check(on_ranks(2, resume_runs, shared)[0], saved * 2)


def test_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    """Rows that were padding would take part in the softmax."""
    case = Case(str(tmp_path), stage=3)
    save_runs(Topology(), [case])
    config = replace(MODELS["gpt2"], padded_vocab_size=300, make_vocab_size_divisible_by=384)
    engine = engine_of(config, VOCAB, zero=ZeroConfig(zero_stage=3))
    with pytest.raises(ValueError, match=r"^--make-vocab-size-divisible-by 384: the model of .* has 128"):
        load_checkpoint(case.path, engine, TOKENIZER, with_optimizer=True)
