"""Checkpoints whose units have blocks of rows of a table: what is read of them, and damage in state.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.unit_entries import formats_of_units
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.storage.checksums import DamagedFile, checksums_of
from tests.checkpoint.saving import save, small

Damage = Callable[[list[dict[str, Any]]], Any]
TABLE = "embedding.tokens.weight"
DAMAGES: dict[str, Damage] = {
    "a gap": lambda blocks: blocks[1].update(rows=[51, 49]),
    "an overlap": lambda blocks: blocks[1].update(rows=[49, 50]),
    "too few": lambda blocks: blocks[2].update(rows=[100, 27]),
    "too many": lambda blocks: blocks[2].update(rows=[100, 29]),
    "whole": lambda blocks: blocks[0].pop("rows"),
    "negative": lambda blocks: blocks[0].update(rows=[-1, 50]),
    "one number": lambda blocks: blocks[0].update(rows=[50]),
    "no list": lambda blocks: blocks[0].update(rows=50),
    "text": lambda blocks: blocks[0].update(rows=["0", "50"]),
    "two shapes": lambda blocks: blocks[1].update(shape=[128, 31]),
    "a scalar": lambda blocks: blocks[0].update(shape=[]),
    "huge": lambda blocks: [block.update(shape=[2**40, 32]) for block in blocks],
    "split": lambda blocks: blocks[0].update(split={"dim": 0, "runs": [128]}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("blocks"), small(zero_stage=3, zero_table_rows=50))


@pytest.mark.parametrize("name", DAMAGES)
def test_blocks_that_are_no_table_are_found(checkpoint: Path, name: str) -> None:
    text = (checkpoint / STATE).read_text()
    state = json.loads(text)
    blocks = [unit["parameters"][TABLE] for unit in state["units"] if TABLE in unit["parameters"]]
    assert [block["rows"] for block in blocks] == [[0, 50], [50, 50], [100, 28]]
    DAMAGES[name](blocks)
    try:
        seal(checkpoint, json.dumps(state))
        with pytest.raises(DamagedFile, match="not the state of a run"), CheckpointReader(checkpoint):
            pass
    finally:
        seal(checkpoint, text)
    with CheckpointReader(checkpoint) as reader:
        assert reader.parameters()[TABLE].shape == (128, 32)


def seal(path: Path, state: str) -> None:
    """Another state.json, with right checksums."""
    (path / STATE).write_text(state)
    write_manifest(path, read_manifest(path) | {STATE: checksums_of(path / STATE)}, 7)


def test_blocks_take_after_the_blocks_that_have_their_rows() -> None:
    """The formats of weight differences, from a whole table to blocks, and to blocks of another size."""

    def units(*rows: tuple[int, int]) -> list[dict[str, Any]]:
        entries = [{"shape": [100, 4]} | ({"rows": [*each]} if each != (0, 100) else {}) for each in rows]
        return [{"parameters": {"table": entry}} for entry in entries]

    whole, halves, others = units((0, 100)), units((0, 50), (50, 50)), units((0, 40), (40, 40), (80, 20))
    of_whole = {"raised": [True], "measured": [[4.0, 1.0]]}
    of_halves = {"raised": [False, True], "measured": [[4.0, 1.0], [9.0, 8.0]]}
    assert formats_of_units(of_whole, whole, halves) == {"raised": [True] * 2, "measured": [[4.0, 1.0]] * 2}
    assert formats_of_units(of_halves, halves, halves) == of_halves
    assert formats_of_units(of_halves, halves, others) == {
        "raised": [False, True, True],
        "measured": [[4.0, 1.0], [13.0, 9.0], [9.0, 8.0]],
    }
    assert formats_of_units(of_halves, halves, whole) == {"raised": [True], "measured": [[13.0, 9.0]]}
