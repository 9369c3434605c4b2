"""Runs that resume with another blend: the same text whatever the ranks, and a log that says what changes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import logged, trained
from tests.train.conftest import BYTES, TINY


def state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


def test_other_weights_after_a_resume(corpus: str, tmp_path: Path) -> None:
    """On any number of ranks; a restart without a change keeps the position of the earlier change.

    The blend is of the corpus, tokenised, and the corpus reversed, as text.
    """
    one, other = corpus, str(tmp_path / "other.jsonl")
    documents = " ".join(map(str, np.fromfile(f"{corpus}.bin", np.uint16)[::-1])).split("256")
    Path(other).write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    flags = [*BYTES, *TINY, "--split", "90,10,0", "--global-batch-size", "8", "--train-iters", "6", "--fp32"]
    flags += ["--append-eod", "--eod-mask-loss"]

    def go_on(weights: tuple[str, str], name: str, stop: int, ranks: int) -> str:
        save, metrics = str(tmp_path / name), str(tmp_path / f"{name}.jsonl")
        blend = ["--data-path", weights[0], one, weights[1], other]
        on = ["--save", save, "--load", save, "--metrics-file", metrics, "--exit-interval", str(stop)]
        return trained(*blend, *flags, *on, processes=ranks)

    out = go_on(("1", "3"), "a", 2, 1)
    assert " train: the run's 48 samples read" in out
    assert "so far" not in out
    out = go_on(("3", "1"), "a", 4, 2)
    assert (
        f"""
 the blend changes at sample 16; each data set continues from where it was:
   25.00% -> 75.00% {one}, from its sample 4 on
   75.00% -> 25.00% {other}, from its sample 12 on
 train: the 16 samples so far read 0."""
        in out
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "the blend changes" not in go_on(("3", "1"), "a", 6, 1)
    go_on(("3", "1"), "b", 6, 2)
    assert logged(tmp_path / "a.jsonl") == pytest.approx(logged(tmp_path / "b.jsonl"), rel=1e-5)
    dataset_progress = state(tmp_path / "a" / "iter_0000006")["progress"]["dataset_progress"]
    assert [(part["consumed_before"], part["weight"]) for part in dataset_progress["sets"]] == [
        (4, 3.0),
        (12, 1.0),
    ]
    assert dataset_progress["since"] == 16
