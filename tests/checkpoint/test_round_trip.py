"""What is saved comes back, bit for bit, at any stage and on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import formats_of_units
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import FIRST, TOKENIZER, digests, save, small, train
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks


def save_at(topology: Topology, directory: str, stage: int) -> dict[str, str]:
    engine = small(topology=topology, zero_stage=stage)
    train(engine, 2, seed=2)
    save(Path(directory), engine)
    return digests(engine)


def load_at(topology: Topology, directories: list[str], stages: list[int]) -> list[dict[str, str]]:
    found = []
    for directory, stage in zip(directories, stages, strict=True):
        engine = small(topology=topology, zero_stage=stage, seed=99)
        path = Path(directory) / "iter_0000005"
        assert load_checkpoint(path, engine, TOKENIZER, with_optimizer=True) == FIRST
        assert engine.states.optimizer_steps == 2
        found.append(digests(engine))
    return found


def test_any_stage_and_world_loads_any_other(tmp_path: Path) -> None:
    saves = [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)]
    directories = [str(tmp_path / f"{world}-{stage}") for world, stage in saves]
    saved = [
        on_ranks(world, save_at, directory, stage)[0]
        for (world, stage), directory in zip(saves, directories, strict=True)
    ]
    for world, stages in ((1, [0, 1, 2, 3, 0]), (3, [3, 2, 1, 0, 3]), (4, [0, 3, 3, 1, 2])):
        for found in on_ranks(world, load_at, directories, stages):
            assert found == saved


def test_runs_with_and_without_quantisation_load_each_others_states(tmp_path: Path) -> None:
    """A block decides where parameters lie; so versions that aligned them otherwise are read, too."""
    blocks = [{}, {"zero_quantized_weights": True}]
    saved, places = [], []
    for number, settings in enumerate(blocks):
        engine = small(zero_stage=3, **settings)
        train(engine, 2, seed=2)
        saved.append((save(tmp_path / str(number), engine), digests(engine)))
        places.append([unit.layout.offsets for unit in engine.units])
        with CheckpointReader(saved[-1][0]) as reader:
            whole = reader.parameters()
        assert whole.keys() == weights_of(engine).keys()
        for name, weight in weights_of(engine).items():
            assert torch.equal(whole[name], weight), name
    assert places[0] != places[1]
    assert not any(
        offset % 256 for offsets in places[1] for offset in offsets
    )  # no block is of two parameters
    for settings in blocks:
        for path, states in saved:
            engine = small(seed=99, zero_stage=3, **settings)
            load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
            assert digests(engine) == states
            for unit in engine.units:
                assert not any(unit.master[gap].any() for gap in unit.layout.gaps_in(unit.owned))


def test_without_the_optimizer_only_weights_come_back(tmp_path: Path) -> None:
    engine = small()
    train(engine, 2, seed=2)
    path = save(tmp_path, engine, with_optimizer=False)
    other = small(seed=99)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=False)
    assert other.states.optimizer_steps == 0
    assert all(torch.equal(weights_of(other)[name], weight) for name, weight in weights_of(engine).items())
    with pytest.raises(ValueError, match="--no-load-optim"):
        load_checkpoint(path, other, TOKENIZER, with_optimizer=True)


def test_another_model_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, small())
    with pytest.raises(ValueError, match=r"has shape .*, this model needs"):
        load_checkpoint(path, small(hidden=64), TOKENIZER, with_optimizer=True)
    with pytest.raises(ValueError, match="tokenizer"):
        load_checkpoint(path, small(), {**TOKENIZER, "fingerprint": "0" * 64}, with_optimizer=True)


def test_units_take_after_the_units_that_have_their_parameters() -> None:
    """The formats of weight differences, from a layer to its halves and back, and from rows of a table."""

    def units(*names: str) -> list[dict[str, Any]]:
        return [{"parameters": dict.fromkeys(each)} for each in names]

    layer, halves, table, rows = units("ab"), units("a", "b"), units("t"), units("t", "t")
    of_one = {"raised": [True], "measured": [[4.0, 1.0]]}
    of_two = {"raised": [False, True], "measured": [[4.0, 1.0], [9.0, 8.0]]}
    assert formats_of_units(of_one, layer, halves) == {"raised": [True] * 2, "measured": [[4.0, 1.0]] * 2}
    assert formats_of_units(of_two, halves, halves) == of_two
    for saved, present in ((halves, layer), (rows, table)):
        assert formats_of_units(of_two, saved, present) == {"raised": [True], "measured": [[13.0, 9.0]]}
