"""Damage to checkpoints of several tensor ranks, and descriptions of shares that no run can have written."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults.mutations import change_json, changes_of_json
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.write import STATE, shard_file_name
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, checksums_of
from tests.checkpoint.saving import TOKENIZER, save, small
from tests.zero.ranks import on_ranks

RANKS, TENSOR = 4, 2
FLIPS = 20  # of each file


def save_shared(topology: Topology, directory: str) -> str:
    return str(save(Path(directory), small(topology=topology, tensor=TENSOR, zero_stage=3)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two tensor ranks × two data ranks."""
    return Path(on_ranks(RANKS, save_shared, str(tmp_path_factory.mktemp("shared")))[0])


def load(path: Path) -> None:
    load_checkpoint(path, small(), TOKENIZER, with_optimizer=True)


def seal(path: Path, state: str) -> None:
    """Another state.json, with right checksums."""
    (path / STATE).write_text(state)
    write_manifest(path, read_manifest(path) | {STATE: checksums_of(path / STATE)})


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_flipped_bit_of_any_tensor_rank_is_found(checkpoint: Path, rank: int) -> None:
    file, draw = checkpoint / shard_file_name(rank), random.Random(rank)
    content = file.read_bytes()
    try:
        for bit in draw.sample(range(8 * len(content)), FLIPS):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(DamagedFile, match=file.name):
                load(checkpoint)
            with pytest.raises(DamagedFile, match=file.name), CheckpointReader(checkpoint) as reader:
                reader.check_rest(rank % RANKS, RANKS)
        file.unlink()
        with pytest.raises(DamagedFile, match=file.name):
            load(checkpoint)
    finally:
        file.write_bytes(content)
    load(checkpoint)


def a_split(state: dict[str, Any]) -> dict[str, Any]:
    """The first entry of a parameter that is split."""
    return next(entry for unit in state["units"] for entry in unit["parameters"].values() if "split" in entry)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({key: value})


def put_split(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: a_split(state)["split"].update(values)


def put_entry(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: a_split(state).update(values)


@pytest.mark.parametrize(
    "change",
    [
        *(put("tensor", value) for value in (0, -2, 3, 4, 8, 2**60, True, 2.0, "2", None, [2])),
        lambda state: state.pop("tensor"),
        put("ranks", 8),  # without files
        put("ranks", 3),
        put("nodes", 4),  # a tensor group would cross nodes
        *(put_split(dim=dim) for dim in (2, -1, 2**40, "0", None, True)),
        *(
            put_split(runs=runs)
            for runs in ([], [2], [128, 2], [127, 1], [64, -64, 128], ["128"], [None], 128)
        ),
        *(put_entry(split=split) for split in (None, {}, [], {"dim": 0}, {"runs": [128]}, "x")),
        put_entry(shape=[2**40, 2**40]),
        put_entry(shape=[128] * 100_000),
        put_entry(shape=[]),
        put_entry(offset=2**40),
        put_entry(offset=-1),
    ],
)
def test_a_crafted_share_is_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    good = (checkpoint / STATE).read_text()
    state = json.loads(good)
    change(state)
    try:
        seal(checkpoint, json.dumps(state))
        with pytest.raises(DamagedFile) as refused:
            load(checkpoint)
        assert str(checkpoint) in str(refused.value)
        assert "\n" not in str(refused.value)
    finally:
        seal(checkpoint, good)


def test_another_dimension_is_refused(checkpoint: Path) -> None:
    """What a rank can only assemble by way of whole parameters, which one tensor rank reads."""
    from megatron_zpp.checkpoint.same_model import check_units

    with CheckpointReader(checkpoint) as reader:
        units = reader.units
    present = json.loads(json.dumps(units))
    entry = a_split({"units": present})
    entry["split"] = {"dim": 1, "runs": [entry["shape"][1]]}
    with pytest.raises(ValueError, match=r"split along dimension 0.*load it without tensor parallelism"):
        check_units(checkpoint, units, present)


@settings(max_examples=150)
@given(changes_of_json(), st.booleans())
def test_changed_descriptions_load_or_are_refused_in_a_line(
    checkpoint: Path, changes: list[Any], of_a_parameter: bool
) -> None:
    good = (checkpoint / STATE).read_text()
    state = json.loads(good)
    keys = ("ranks", "nodes", "tensor", "units")
    try:
        if of_a_parameter:
            entry = a_split(state)
            changed = json.loads(change_json(entry, changes))
            entry.clear()
            entry.update(changed if isinstance(changed, dict) else {})
        else:
            changed = json.loads(change_json({key: state[key] for key in keys}, changes))
            state = {key: value for key, value in state.items() if key not in keys} | (
                changed if isinstance(changed, dict) else {}
            )
        seal(checkpoint, json.dumps(state))
    except (RecursionError, ValueError):
        seal(checkpoint, good)
        return
    said = ""
    try:
        load(checkpoint)
        with CheckpointReader(checkpoint) as reader:
            reader.parameters()
    except ValueError as refused:
        said = str(refused)
    finally:
        seal(checkpoint, good)
    assert "\n" not in said
    assert len(said) < 1000
