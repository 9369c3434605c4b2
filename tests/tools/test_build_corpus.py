"""build_corpus.py as a person runs it: each source, awkward files, and nothing half-written."""

import gzip
import json
import sysconfig
import tokenize
from pathlib import Path

import pytest
import zstandard

from tests.tools.run import fail, succeed

TOOL = "build_corpus.py"


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_standard_library(tmp_path: Path) -> None:
    """Modules are there, decoded as Python decodes them; tests, tables and installed packages are not."""
    result = succeed(TOOL, "--output", tmp_path / "new" / "corpus.jsonl")
    assert "documents of Python's standard library" in result.stdout
    records = read(tmp_path / "new" / "corpus.jsonl")
    paths = [record["path"] for record in records]
    assert len(set(paths)) == len(paths)
    assert paths == sorted(paths, key=lambda path: path.split("/"))
    assert {"os.py", "asyncio/base_events.py", "json/__init__.py"} <= set(paths)
    folders = {folder for path in paths for folder in path.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    directory = Path(sysconfig.get_paths()["stdlib"])
    for record in records[::50]:
        with tokenize.open(directory / record["path"]) as file:
            assert record["text"] == file.read()
    assert 4e6 < sum(len(record["text"]) for record in records) < 16e6
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("name", ["", "*.jsonl"])
def test_a_repeated_call_does_not_read_its_own_output(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    output = tmp_path / "corpus.jsonl"
    for _ in range(2):
        succeed(TOOL, "--input", tmp_path / name, "--output", output)
        assert [record["text"] for record in read(output)] == ["one"]
    error = fail(TOOL, "--input", tmp_path / "a.jsonl", output, "--output", output)
    assert f"--input {output}: is --output as well; give another file to one of them" in error
    assert [record["text"] for record in read(output)] == ["one"]


def test_files(tmp_path: Path) -> None:
    """Text files are a document each, JSON lines a document a line, in the order given."""
    (tmp_path / "b.txt").write_bytes("\ufefféine\r\nZeile ".encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed\n\ntext\n"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\n\xe9")
    (tmp_path / "c.jsonl.zst").write_bytes(
        zstandard.compress(b'{"body": "1"}\n\nbroken\n{"body": "\\u00e9"}')
    )
    result = succeed(TOOL, "--input", tmp_path / "*.txt*", tmp_path / "c.jsonl.zst", "--json-key", "body",
                     "--output", tmp_path / "out.jsonl")  # fmt: skip
    assert read(tmp_path / "out.jsonl") == [
        {"text": "packed\n\ntext\n", "path": f"{tmp_path}/a.txt.gz"},
        {"text": "éine\r\nZeile ", "path": f"{tmp_path}/b.txt"},
        {"text": "1"},
        {"text": "é"},
    ]
    assert f"{tmp_path}/latin.txt line 3: malformed line: not UTF-8" in result.stderr
    assert f"{tmp_path}/c.jsonl.zst line 3: malformed line: not JSON" in result.stderr
    assert "2 × malformed line, 1 × empty document" in result.stdout


def test_a_damaged_file_leaves_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 10_000)[:-9])
    error = fail(TOOL, "--input", tmp_path / "in.jsonl.gz", "--output", tmp_path / "out.jsonl")
    assert "in.jsonl.gz: the file ends in the middle" in error
    (tmp_path / "empty.txt").write_text("")
    error = fail(TOOL, "--output", tmp_path / "out.jsonl", "--input", tmp_path / "empty.txt")
    assert "no documents (skipped: 1 × empty document)" in error
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3
