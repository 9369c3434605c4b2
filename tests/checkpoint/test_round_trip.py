"""What one rank saves comes back, bit for bit; test_tensor_parallel.py has more ranks, and other stages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults.engines import train
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import formats_of_units
from tests.checkpoint.saving import TOKENIZER, digests, save, small
from tests.zero.engines import weights_of


def test_runs_with_and_without_quantisation_load_each_others_states(tmp_path: Path) -> None:
    """A block decides where parameters lie; so versions that aligned them otherwise are read, too."""
    blocks = [{}, {"zero_quantized_weights": True}]
    saved, places = [], []
    for number, settings in enumerate(blocks):
        engine = small(zero_stage=3, **settings)
        train(engine, seed=2)
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
    train(engine, seed=2)
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
