"""Blocks and samples: every line exactly once, for all cuts."""

from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.corpus.inputs import find_files, lines_that_begin, read_blocks
from megatron_zpp.data.corpus.sample import sample_text

LINES = st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12)


@given(LINES, st.booleans(), st.integers(1, 20), st.lists(st.integers(0, 60), max_size=4))
def test_every_line_is_in_one_block(tmp_path: Path, lines, end: bool, block_bytes: int, cuts) -> None:
    """And, for any cuts of a file, in the part in which it begins."""
    content = b"\n".join(lines) + b"\n" * end
    path = tmp_path / "f"
    path.write_bytes(content)
    blocks = list(read_blocks(str(path), block_bytes))
    assert b"".join(block.content for block in blocks) == content
    assert all(block.content.endswith(b"\n") for block in blocks[:-1])
    assert sum(block.disk_bytes for block in blocks) == len(content)
    begins = [0, *(offset + 1 for offset, byte in enumerate(content) if byte == ord("\n"))]
    for start, stop in pairwise(sorted([0, len(content), *(min(cut, len(content)) for cut in cuts)])):
        mine = [content[a:b] for a, b in pairwise([*begins, len(content)]) if start <= a < stop]
        with path.open("rb") as raw:
            assert lines_that_begin(raw, start, stop) == b"".join(mine)


def test_a_line_of_many_parts_is_read_once_by_its_own_part_and_once_by_the_others() -> None:
    raw = BytesIO(b"x" * 1000 + b"\n")
    read = []
    for start in range(0, 1000, 10):
        lines_that_begin(raw, start, start + 10)
        read.append(raw.tell() - start)
    assert read == [1001, *[10] * 99]


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 99 + b"\n" + (b"y" * 9 + b"\n") * 1000)
    sizes = [len(block.content) for block in read_blocks(str(tmp_path / "f"), 50)]
    assert sizes[0] == 100
    assert max(sizes[1:]) <= 60


def test_find_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "[1].jsonl", "d/c.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    assert find_files("--input", ["b.jsonl", "a*"]) == ["b.jsonl", "a.jsonl"]
    assert find_files("--input", ["[1].jsonl"]) == ["[1].jsonl"]
    for pattern in ("**/c.jsonl", "**/**/c.jsonl", "d"):
        assert find_files("--input", [pattern]) == ["d/c.jsonl"]
    for patterns in (["**/c.jsonl", "d"], ["d/c.jsonl", str(tmp_path / "d/../d/c.jsonl")], ["d", "d"]):
        with pytest.raises(ValueError, match=r"^--input .*c\.jsonl: .* has it already; give each file once$"):
            find_files("--input", patterns)
    with pytest.raises(ValueError, match=r"^--input x\*: no such file"):
        find_files("--input", ["x*"])
    Path("d/latest.jsonl").symlink_to("c.jsonl")
    with pytest.raises(ValueError, match=r"^--input d/latest\.jsonl: d/c\.jsonl has it already"):
        find_files("--input", ["d"])


@pytest.mark.parametrize("pattern", ["c", "c/**/*.json*"])
def test_what_the_program_writes_beside_text_is_not_text(tmp_path: Path, monkeypatch, pattern: str) -> None:
    """Otherwise a cached copy would double its documents."""
    monkeypatch.chdir(tmp_path)
    text = ["c/a.jsonl", "c/d/b.jsonl.gz", "c/notes.tokenizer.json"]
    caches = ["c/a.jsonl.tokens/1.jsonl", "c/d/e.tokens/2/made_of.json", "c/x.orders/1/made_of.json"]
    others = ["c/.git/a.jsonl", "c/x.idx", "c/x.checksums.json", "c/x.tokenizer.json", "c/y.png"]
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
