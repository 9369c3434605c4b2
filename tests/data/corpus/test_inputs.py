"""Spans, blocks and samples: every line exactly once, for all cuts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.corpus.inputs import Span, find_files, lines_before, partition, read_blocks, whole
from megatron_zpp.data.corpus.sample import sample_text

LINES = st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12)


@given(st.lists(LINES, min_size=1, max_size=4), st.booleans(), st.integers(1, 6), st.integers(1, 20))
def test_partitions_hold_every_line_once(tmp_path: Path, files, end, count: int, block_bytes: int) -> None:
    contents = [b"\n".join(lines) + b"\n" * end for lines in files]
    paths = [str(tmp_path / str(index)) for index in range(len(files))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(content)
    runs = partition(paths, count)
    assert len(runs) == count
    blocks = [block for run in runs for span in run for block in read_blocks(span, block_bytes)]
    for path, content in zip(paths, contents, strict=True):
        mine = [block for block in blocks if block.span.path == path]
        assert b"".join(block.content for block in mine) == content
        assert all(block.content.endswith(b"\n") for block in mine[:-1])
        assert sum(block.disk_bytes for block in mine) == len(content)


@given(LINES, st.data())
def test_lines_before_a_span(tmp_path: Path, lines: list[bytes], data: st.DataObject) -> None:
    content = b"\n".join(lines)
    (tmp_path / "f").write_bytes(content)
    start = data.draw(st.integers(0, len(content)))
    span = Span(str(tmp_path / "f"), start, len(content))
    first = b"".join(block.content for block in read_blocks(span, 7))
    assert lines_before(span) == content[: len(content) - len(first)].count(b"\n")


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 99 + b"\n" + (b"y" * 9 + b"\n") * 1000)
    sizes = [len(block.content) for block in read_blocks(whole(str(tmp_path / "f")), 50)]
    assert sizes[0] == 100
    assert max(sizes[1:]) <= 60


def test_find_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "[1].jsonl", "d/c.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    assert find_files("--input", ["b.jsonl", "a*"]) == ["b.jsonl", "a.jsonl"]
    assert find_files("--input", ["[1].jsonl"]) == ["[1].jsonl"]
    assert find_files("--input", ["**/c.jsonl", "d"]) == ["d/c.jsonl"] * 2
    with pytest.raises(ValueError, match=r"^--input x\*: no such file"):
        find_files("--input", ["x*"])


@pytest.mark.parametrize("pattern", ["c", "c/**/*.json*"])
def test_what_the_program_writes_beside_text_is_not_text(tmp_path: Path, monkeypatch, pattern: str) -> None:
    """Otherwise a cached copy would double its documents."""
    monkeypatch.chdir(tmp_path)
    text = ["c/a.jsonl", "c/d/b.jsonl.gz", "c/notes.tokenizer.json"]
    caches = ["c/a.jsonl.tokens/1.jsonl", "c/d/e.tokens/2/made_of.json", "c/x.orders/1/made_of.json"]
    others = ["c/.git/a.jsonl", "c/x.idx", "c/x.checksums.json", "c/x.tokenizer.json"]
    for name in text + caches + others:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    assert find_files("--input", [pattern]) == text
    assert find_files("--input", [str(tmp_path / pattern)]) == [str(tmp_path / name) for name in text]
    assert find_files("--input", ["c/a.jsonl.tokens", "c/.git"]) == [caches[0], others[0]]
    assert find_files("--input", ["c/*.tokens/*"]) == [caches[0]]


@given(st.lists(st.text(alphabet="ab\né", max_size=50)))
def test_a_sample_of_everything_is_everything(texts: list[str]) -> None:
    assert "".join(sample_text(texts, 10**6)) == "".join(texts)


def test_a_sample_is_bounded_and_from_all_over() -> None:
    texts = [f"{index:05}\n" * 1000 for index in range(500)]  # 6,000 bytes each
    sample = sample_text(texts, 300_000)
    assert 290_000 < sum(map(len, sample)) <= 300_000
    numbers = [int(chunk[:5]) for chunk in sample]
    assert numbers == sorted(numbers)
    quarters = [sum(1 for number in numbers if number // 125 == quarter) for quarter in range(4)]
    assert min(quarters) >= 5
    assert sample == sample_text(texts, 300_000)
