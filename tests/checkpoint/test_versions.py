"""Checkpoints of earlier format versions."""

import json
import math
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_zpp.checkpoint.load import load_checkpoint, saved_settings
from megatron_zpp.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.same_model import TABLES
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.config.root import parse_args
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.data.dataset_progress import DatasetProgress, SourceProgress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, checksums_of
from tests.checkpoint.saving import FIRST, TOKENIZER, flip, save, small
from tests.config.command_line import MINIMAL
from tests.support import trained
from tests.zero.engines import all_states, engine_of, same_bits, weights_of
from tests.zero.ranks import on_ranks


def test_dataset_progress_of_version_2_is_read(tmp_path: Path) -> None:
    sources = SourceProgress("a", "", 0, 1.0, 7), SourceProgress("b", "", 1, 3.0, 0)
    progress = Progress(5, 50, dataset_progress=DatasetProgress("windows", 20, sources))
    path = save(tmp_path, small(), progress)
    state = json.loads((path / STATE).read_text())
    data = state["progress"].pop("dataset_progress")
    for entry in data["sets"]:
        entry["given"] = entry.pop("consumed_before")
    state["progress"]["standing"] = data
    rewrite(path, state, 2)
    found = load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True)
    assert found == progress


def test_choices_of_retired_flags_are_read(tmp_path: Path) -> None:
    """Algorithms of matmuls in the progress, and both flags in the settings."""
    config = parse_args([*MINIMAL, "--bf16", "--fp8"])
    path = save(tmp_path, small(), config=config.to_json())
    state = json.loads((path / STATE).read_text())
    products = {"device": "NVIDIA H200", "cublaslt": 130100, "torch": "2.11.0"}
    state["progress"]["products"] = products | {"chosen": {"bfloat16_64x96x32_nt_bias": "0" * 144}}
    state["config"]["compilation"]["gemm_algorithms"] = "measured"
    state["config"]["precision"]["fp8_products"] = "measured"
    rewrite(path, state, 5)
    assert load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True) == FIRST
    with CheckpointReader(path) as reader:
        assert reader.config() == config


def extracted(name: str, factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of an archive beside this file."""
    directory = factory.mktemp("older")
    with tarfile.open(Path(__file__).parent / name) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks that the program wrote while its format was version 2, 3, 4 and 5."""
    return extracted("older_versions.tar.xz", tmp_path_factory)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of runs with `--zero-table-rows 10` at stage 3, whose tables have 21 rows padded to 24.

    `version_7` is of two data ranks, and has one table. `version_9` is of two data times two tensor ranks,
    and has output weights of its own. `whole.safetensors` beside each has its whole states, which were cut
    from the files of ranks by hand.
    """
    return extracted("blocks_of_rows.tar.xz", tmp_path_factory)


def by_hand(path: Path) -> dict[str, list[float]]:
    """All parameters of a checkpoint of two data ranks on one node, where rank r has shard r."""
    units = json.loads((path / STATE).read_text())["units"]
    files = [load_file(path / f"rank_0000{rank}.safetensors") for rank in (0, 1)]
    found = {}
    for index, unit in enumerate(units):
        flat = torch.cat([file[f"weights/unit_{index}"] for file in files])
        for name, entry in unit["parameters"].items():
            count = math.prod(entry["shape"])
            found[name] = flat[entry["offset"] :][:count].tolist()
    return found


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_files_of_an_older_program_are_read(older: Path, version: int) -> None:
    path = older / f"version_{version}" / "iter_0000005"
    assert json.loads((path / MANIFEST).read_text())["format_version"] == version
    wanted = by_hand(path)
    engine = small(hidden=8, seed=9)
    progress = load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
    assert (progress.iteration, progress.consumed_samples, engine.states.optimizer_steps) == (5, 50, 1)
    assert {name: weight.flatten().tolist() for name, weight in weights_of(engine).items()} == wanted
    assert saved_settings(path)[1] == 2  # data ranks
    if version in (3, 4):  # which did not know tensor ranks
        assert on_ranks(2, load_shared, str(path)) == [wanted] * 2
    with CheckpointReader(path) as reader:
        assert {name: whole.flatten().tolist() for name, whole in reader.parameters().items()} == wanted
    file = path / "rank_00001.safetensors"
    flip(file)
    with pytest.raises(DamagedFile, match=f"{file}: damaged between bytes 0 and {file.stat().st_size}"):
        load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)


def load_shared(topology: Topology, path: str) -> dict[str, list[float]]:
    engine = small(hidden=8, seed=9, topology=topology, tensor=topology.world_size, zero_stage=3)
    load_checkpoint(Path(path), engine, TOKENIZER, with_optimizer=True)
    return {name: weight.flatten().tolist() for name, weight in weights_of(engine).items()}


BLOCKS = [7, 9]
# (tensor ranks, stage, multiple of the rows of the tables), by ranks.
READERS = {1: [(1, 0, 8), (1, 3, 7)], 2: [(1, 3, 8), (2, 1, 8)], 4: [(2, 2, 32), (2, 3, 8), (1, 1, 11)]}


def blocks_of(directory: Path, version: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with blocks of rows, and what is in it by kind and name."""
    path = directory / f"version_{version}" / "iter_0000002"
    assert json.loads((path / MANIFEST).read_text())["format_version"] == version
    units = json.loads((path / STATE).read_text())["units"]
    assert [unit["parameters"][TABLES[0]]["rows"] for unit in units[:3]] == [[0, 10], [10, 10], [20, 4]]
    return path, load_file(path.parent / "whole.safetensors")


def readers_of_blocks(topology: Topology, directory: Path) -> list[bool]:
    """Whether engines have all states of checkpoints with blocks of rows, by version and reader."""
    found = []
    for version in BLOCKS:
        path, wanted = blocks_of(directory, version)
        with CheckpointReader(path) as reader:
            model = reader.config().model
        for tensor, stage, multiple in READERS[topology.world_size]:
            padded = replace(model, make_vocab_size_divisible_by=multiple)
            zero = ZeroConfig(zero_stage=stage)
            engine = engine_of(padded, 21, zero=zero, topology=topology, tensor=tensor, seed=9)
            assert load_checkpoint(path, engine, None, with_optimizer=True).consumed_samples == 8
            states = all_states(engine)
            for name in states.keys() & {
                f"{kind}/{table}" for kind in engine.states.kinds for table in TABLES
            }:
                assert not states[name][21:].any()
                states[name] = torch.cat((states[name][:21], torch.zeros(3, 4)))
            found.append(same_bits(states, wanted))
            engine.close()
    return found


@pytest.mark.parametrize("ranks", READERS)
def test_any_ranks_load_tables_that_were_saved_in_blocks(blocks: Path, ranks: int) -> None:
    """At other stages, tensor ranks, nodes and paddings of the vocabulary."""
    for found in on_ranks(ranks, readers_of_blocks, blocks, ranks_per_node=2):
        assert found == [True] * len(BLOCKS) * len(READERS[ranks])


@pytest.mark.parametrize("version", BLOCKS)
def test_one_process_reads_tables_that_were_saved_in_blocks(
    blocks: Path, version: int, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """Whole, and as another program's model."""
    path, wanted = blocks_of(blocks, version)
    with CheckpointReader(path) as reader:
        weights = {f"weights/{name}": whole for name, whole in reader.parameters().items()}
    assert same_bits(weights, {key: each for key, each in wanted.items() if key.startswith("weights/")})
    tool("export", path.parent, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    tables = {7: ["transformer.wte.weight"], 9: ["model.embed_tokens.weight", "lm_head.weight"]}
    for theirs, ours in zip(tables[version], TABLES, strict=False):
        assert torch.equal(exported[theirs][:21], wanted[f"weights/{ours}"][:21])


def test_a_run_resumes_from_tables_that_were_saved_in_blocks(blocks: Path, tmp_path: Path) -> None:
    """With the saved arguments: the log names the retired one."""
    flags = "--use-checkpoint-args --mock-data --micro-batch-size 2 --eval-iters 0 --num-workers 0".split()
    flags += ["--load", str(blocks / "version_9"), "--save", str(tmp_path), "--train-iters", "3"]
    said = trained(*flags, "--lr", "1e-2", "--device", "cpu")
    assert "resuming at iteration 2, 8 samples" in said
    assert "--zero-table-rows 10 → retired" in said
    state = json.loads((tmp_path / "iter_0000003" / STATE).read_text())
    assert "zero_table_rows" not in state["config"]["zero"]
    assert not any("rows" in entry for unit in state["units"] for entry in unit["parameters"].values())


def rewrite(path: Path, state: dict[str, Any], version: int) -> None:
    """Write another state.json and the manifest of a version, which has all digests."""
    (path / STATE).write_text(json.dumps(state))
    files = {name: checksums_of(path / name) for name in read_manifest(path)}
    for sidecar in path.glob("*.sha256"):
        sidecar.unlink()
    write_manifest(path, files, version)
