"""preprocess_data.py as a person runs it: results, awkward input, and every way of being stopped."""

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron_zpp.data.indexed import IndexedDataset, verify_tokens
from tests.support import ended, wait_until
from tests.tools.run import command, fail, succeed

TOOL = "preprocess_data.py"
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 70_000)


def numbers(count: int, seed: int = 0) -> list[list[int]]:
    """Documents of ids, of 1 to 999 ids each."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 70_000, rng.integers(1, 1000)).tolist() for _ in range(count)]


def preprocess(file: object, directory: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """The finished tool, which has written DIRECTORY/out."""
    return succeed(TOOL, "--input", file, "--output-prefix", directory / "out", *NULL, *flags)


def line(ids: list[int], **more: object) -> bytes:
    return json.dumps({"text": " ".join(map(str, ids)), **more}).encode() + b"\n"


def documents(prefix: object, key: str = "text") -> list[list[int]]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    ends = np.cumsum(data.lengths)
    return [part.tolist() for part in np.split(np.asarray(data.tokens), ends[:-1])]


def results(directory: Path, name: str = "out") -> dict[str, bytes]:
    return {path.name.removeprefix(name): path.read_bytes() for path in directory.glob(f"{name}_text_*")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 6 MB in three files, one per compression: `numbers(2000)`, and a bad line in a later block."""
    directory = tmp_path_factory.mktemp("corpus")
    lines = [line(ids) for ids in numbers(2000)]
    (directory / "a.jsonl").write_bytes(b"".join([*lines[:999], b"broken\n", *lines[999:1500]]))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1500:1800])))
    (directory / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[1800:])))
    return directory


@pytest.mark.parametrize("workers", [1, 3])
def test_same_result_however_it_is_shared_out(corpus: Path, tmp_path: Path, workers: int) -> None:
    flags = ("--append-eod", "--workers", workers, "--partitions", workers)
    done = preprocess(f"{corpus}/*.jsonl*", tmp_path, *flags)
    assert documents(tmp_path / "out") == [[*ids, 70_000] for ids in numbers(2000)]
    verify_tokens([IndexedDataset(tmp_path / "out_text_document")], 0, 1)
    names = {f"_text_document.{suffix}" for suffix in ("bin", "idx", "checksums.json", "tokenizer.json")}
    assert set(results(tmp_path)) == names
    assert {path.name for path in tmp_path.iterdir()} == {f"out{name}" for name in names}
    assert f"{corpus}/a.jsonl line 1000: malformed line: not JSON" in done.stderr
    assert ("--partitions has no effect" in done.stderr) == (workers > 1)


AWKWARD = (
    b"\xef\xbb\xbf" + line([1, 2])
    + b"\r\n\n  \t \n"
    + line([3]).replace(b"\n", b"\r\n")
    + b'{"text": "4", \n'
    + b'{"other": "5"}\n{"text": 6}\n{"text": null}\n["text"]\n7\n'
    + b'{"text": ""}\n{"text": "eight"}\n'
    + b'{"text": "\xff"}\n{"text": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
    + line([9] * 400_000)
    + line([10]).rstrip(b"\n")
)  # fmt: skip


def test_awkward_lines_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(AWKWARD)
    result = preprocess(tmp_path / "in.jsonl", tmp_path, "--workers", 2)
    assert documents(tmp_path / "out") == [[1, 2], [3], [9] * 400_000, [10]]
    for place in ("6: malformed line", "7: missing key: no 'text'", "8: value that is not text"):
        assert f"{tmp_path}/in.jsonl line {place}" in result.stderr
    for count in ("5 × malformed line", "1 × missing key", "3 × value that is not text",
                  "1 × document without tokens", "1 × document that the tokenizer rejects"):  # fmt: skip
        assert count in result.stdout


def test_strict_stops_at_the_first_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(line([1]))
    (tmp_path / "bad.jsonl").write_bytes(line([2]) + b"{}\n")
    strict = ("--workers", 1, "--strict")
    common = ("--output-prefix", tmp_path / "out", *NULL, *strict)
    error = fail(TOOL, "--input", tmp_path / "bad.jsonl", *common)
    assert "bad.jsonl line 2: missing key" in error
    assert not results(tmp_path)
    preprocess(tmp_path / "good.jsonl", tmp_path, *strict)
    before = results(tmp_path)
    fail(TOOL, "--input", tmp_path / "bad.jsonl", *common)
    assert results(tmp_path) == before


def test_keys_stay_aligned(tmp_path: Path) -> None:
    """A line that lacks one of the keys gives a document to neither."""
    lines = [line([1], title="11"), line([2]), line([3], title=""), line([4], title="44 44")]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    preprocess(tmp_path / "in.jsonl", tmp_path, "--json-keys", "text", "title")
    assert documents(tmp_path / "out", "text") == [[1], [4]]
    assert documents(tmp_path / "out", "title") == [[11], [44, 44]]


def children(pid: int) -> list[int]:
    """The worker processes of a tool."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def long_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some seconds of work."""
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    path.write_bytes(line(list(range(500))) * 20_000)
    return path


@pytest.fixture
def in_the_middle(long_input: Path, tmp_path: Path):
    """Starts a run that takes long and returns once it writes; its output prefix is tmp_path/out."""
    started = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(TOOL, "--input", long_input, "--output-prefix", tmp_path / "out", *NULL,
                    "--workers", 2, "--log-interval", 1),
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert "tokenising: " in process.stderr.readline()
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def kill_a_worker(process: int) -> None:
    os.kill(children(process)[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [
        (kill_a_worker, 1, "a worker process has died"),
        (lambda process: os.killpg(process, signal.SIGTERM), 143, ""),
        (lambda process: os.killpg(process, signal.SIGINT), 130, "interrupted"),
    ],
    ids=["killed worker", "terminated", "interrupted"],
)
def test_a_run_that_ends_early_cleans_up(in_the_middle, tmp_path: Path, stop, status, message) -> None:
    """Signals go to the whole process group, as Ctrl-C and a batch system send them."""
    process = in_the_middle()
    stop(process.pid)
    _, said = process.communicate(timeout=120)
    assert process.returncode == status, said
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_no_final_files_and_no_workers(in_the_middle, tmp_path: Path) -> None:
    process = in_the_middle()
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=120)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx", ".json")]
    wait_until(lambda: all(map(ended, workers)))  # they are nobody's, and know it
    (tmp_path / "in.jsonl").write_bytes(line([1]))
    preprocess(tmp_path / "in.jsonl", tmp_path, "--workers", 2)
    assert documents(tmp_path / "out") == [[1]]
    assert not list(tmp_path.glob("*.partial"))
