"""pretrain_gpt.py on text: a resumed run has the same losses, and errors name the line."""

import inspect
import json
import re
from pathlib import Path

import pytest

from tests.support import pretrain
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


def losses(path: Path) -> list[tuple[str, float]]:
    records = map(json.loads, path.read_text().splitlines())
    return [
        (name, record[name]) for record in records for name in ("lm_loss", "valid_loss") if name in record
    ]


def test_a_resumed_run_has_the_same_losses(flags: list[str], tmp_path: Path) -> None:
    def run(name: str, *more: str, processes: int = 1) -> list[tuple[str, float]]:
        done = pretrain(*flags, *more, "--metrics-file", str(tmp_path / name), processes=processes)
        assert done.returncode == 0, done.stderr
        return losses(tmp_path / name)

    saved = ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    first = run("first", *saved, "--exit-interval", "3", "--num-workers", "1")
    went_on = run("second", *saved, "--num-workers", "2", "--data-cache-path", str(tmp_path / "empty"))
    whole = run("whole", "--num-workers", "0")
    assert first + went_on == whole
    assert len(whole) == 6 + 4
    shared = run("shared", "--zero-stage", "3", "--num-workers", "1", processes=2)
    assert [loss for _, loss in shared] == pytest.approx([loss for _, loss in whole], rel=1e-5)


def test_a_bad_line_ends_a_run_with_one_line(flags: list[str], tmp_path: Path) -> None:
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write("[1, 2]\n")
    lines = (tmp_path / "x.jsonl").read_text().count("\n")
    done = pretrain(*flags)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("pretrain_gpt.py: error: ")
    assert f"x.jsonl line {lines}: malformed line: not a JSON object but a list; correct the line" in error
    assert pretrain(*flags, "--skip-bad-lines").returncode == 0
    done = pretrain(*flags, "--dataset-order", "megatron")
    assert done.returncode == 2
    assert "--dataset-order megatron: " in done.stderr
    assert "x.jsonl is text" in done.stderr


def test_a_resumed_run_reports_that_its_text_has_changed(flags: list[str], tmp_path: Path) -> None:
    """Text of another size starts at its beginning; a copy of the same text continues."""
    saved = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--eval-iters", "0"]

    def said(path: Path, stop: int, *more: str) -> list[str]:
        on = [*flags, *saved, *more, "--data-path", str(path), "--exit-interval", str(stop)]
        done = pretrain(*on)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "WARNING" in line or " -> " in line]

    lines = (tmp_path / "x.jsonl").read_text()
    assert said(tmp_path / "x.jsonl", 1) == []
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "x.jsonl").write_text(lines)
    assert said(tmp_path / "copy" / "x.jsonl", 2) == []
    (tmp_path / "copy" / "x.jsonl").write_text(lines + lines.splitlines()[0] + "\n")
    changed = said(tmp_path / "copy" / "x.jsonl", 3)
    assert any("contents have changed" in line for line in changed), changed
    masked = said(tmp_path / "copy" / "x.jsonl", 4, "--eod-mask-loss")
    assert masked == [
        " WARNING: --eod-mask-loss is given, and was not: the change applies from this iteration on"
    ]
