"""train_tokenizer.py as a person runs it."""

import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.tools.run import succeed

TOOL = "train_tokenizer.py"
SOURCE = [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """The same kind of text in two forms."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in SOURCE)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in.txt").write_text("".join(SOURCE))
    return [tmp_path / "in.jsonl.gz", tmp_path / "in.txt"]


def test_model_of_both_forms(inputs: list[Path], tmp_path: Path) -> None:
    prefix = tmp_path / "new" / "tokenizer"
    result = succeed(TOOL, "--input", *inputs, "--json-key", "body", "--vocab-size", 700,
                     "--model-type", "unigram", "--output-prefix", prefix)  # fmt: skip
    tokenizer = SentencePieceTokenizer(f"{prefix}.model")
    assert tokenizer.vocab_size == 700
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in SOURCE)
    assert [path.name for path in prefix.parent.iterdir()] == ["tokenizer.model"]
    assert "trainer_interface" not in result.stderr


def test_same_input_same_model_from_a_sample(inputs: list[Path], tmp_path: Path) -> None:
    inputs[1].write_text("".join(SOURCE) * 12)
    assert inputs[1].stat().st_size > 2 << 20
    for name in ("one", "two"):
        succeed(TOOL, "--input", inputs[1], "--vocab-size", 700, "--max-train-mib", 1,
                "--output-prefix", tmp_path / name)  # fmt: skip
    assert (tmp_path / "one.model").read_bytes() == (tmp_path / "two.model").read_bytes()
