"""pretrain_gpt.py on text: errors name the line, and a resumed run says that its text has changed."""

import inspect
import json
import re
from pathlib import Path

import pytest

from tests.support import pretrain, trained
from tests.train.conftest import BYTES, TINY


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A tiny model on the lines of a module's source, as bytes."""
    parts = re.split(r"\n(?=def |class )", inspect.getsource(inspect))
    lines = [json.dumps({"text": " ".join(map(str, part.encode()))}) + "\n" for part in parts]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    data = ["--data-path", str(tmp_path / "x.jsonl"), "--append-eod", "--split", "80,10,10"]
    length = "--micro-batch-size 2 --global-batch-size 8 --eval-interval 2 --train-iters 6 --fp32".split()
    return [*data, *BYTES, *TINY, *length]


def test_a_bad_line_ends_a_run_and_changed_text_is_reported(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    flags += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--eval-iters", "0"]
    flags += ["--split", "1"]
    assert pretrain(*flags, "--exit-interval", "1").returncode == 0
    with path.open("a") as file:
        file.write("[1, 2]\n")
    done = pretrain(*flags)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("pretrain_gpt.py: error: ")
    number = path.read_text().count("\n")
    assert f"x.jsonl line {number}: malformed line: a JSON array, not an object; " in error
    out = trained(*flags, "--skip-bad-lines", "--exit-interval", "2")
    assert "x.jsonl, from its beginning, because its contents have changed" in out
