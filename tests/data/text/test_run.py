"""pretrain_gpt.py on text: a resumed run has the same losses, and errors name the line."""

import gzip
import inspect
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support import Run, pretrain, trained, wait_until
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


def training_losses(path: Path) -> dict[int, float]:
    records = map(json.loads, path.read_text().splitlines())
    return {record["iteration"]: record["lm_loss"] for record in records if "lm_loss" in record}


def test_a_run_on_shards_that_is_killed_resumes_with_the_same_losses(
    flags: list[str], tmp_path: Path
) -> None:
    """Bit for bit on as many ranks, without the cache of tokens; on more ranks their sums are rounded."""
    lines = (tmp_path / "x.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "shards").mkdir()
    for number in range(5):
        part = gzip.compress(b"".join(lines[number::5]))
        (tmp_path / "shards" / f"{number}.jsonl.gz").write_bytes(part)
    flags += [
        "--data-path",
        str(tmp_path / "shards" / "*.jsonl.gz"),
        "--data-cache-path",
        str(tmp_path / "cache"),
    ]
    flags += ["--train-iters", "30", "--eval-iters", "0"]
    saved = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "3"]
    whole = pretrain(*flags, "--metrics-file", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    with Run(tmp_path / "killed", 1) as killed:
        killed.start(0, *flags, *saved)
        wait_until(tracker.exists)
        killed.send(0, signal.SIGKILL)
        killed.statuses()
    first = int(tracker.read_text()) + 1
    assert first <= 30
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache")
    trained(*flags, *saved, "--num-workers", "0", "--metrics-file", str(tmp_path / "resumed"))
    expected = {step: loss for step, loss in training_losses(tmp_path / "whole").items() if step >= first}
    assert training_losses(tmp_path / "resumed") == expected
    moved = ["--load", str(tmp_path / "copy"), "--metrics-file", str(tmp_path / "wider")]
    trained(*flags, *moved, processes=2)
    wider = training_losses(tmp_path / "wider")
    assert wider.keys() == expected.keys()
    for step in range(first, min(first + 5, 31)):  # later steps amplify the rounding
        assert wider[step] == pytest.approx(expected[step], rel=1e-5)
