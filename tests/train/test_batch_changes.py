"""Runs that resume with another batch or blend: no sample twice, no lost step, no jump of the rate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.commands.report import read_run
from megatron_zpp.data import loader
from tests.support import logged, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import Resumed, of


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples that the training has read, in order."""
    samples, fetch = [], loader._Ranges.__getitem__

    def fetch_and_note(ranges: loader._Ranges, place: tuple[int, int]) -> object:
        samples.extend(range(place[0], sum(place)))
        return fetch(ranges, place)

    monkeypatch.setattr(loader._Ranges, "__getitem__", fetch_and_note)
    return samples


@pytest.fixture
def resume(corpus: str, tmp_path: Path) -> Resumed:
    """A run that uses all text for training."""
    return Resumed(corpus, tmp_path)


@pytest.mark.parametrize("now", [3, 24])
def test_a_run_in_iterations_takes_them_all(
    resume: Resumed, read: list[int], capsys: pytest.CaptureFixture[str], now: int
) -> None:
    """The learning rate is that of the iteration, as in a run with a constant batch size."""
    flags = ["--train-iters", "6", "--split", "90,10,0", "--eval-iters", "2"]
    resume(*flags, "--global-batch-size", "12", "--exit-interval", "2")
    capsys.readouterr()
    records = [record for record in resume(*flags, "--global-batch-size", str(now)) if "lm_loss" in record]
    assert read == list(range(24 + 4 * now))
    assert of(records, "global_batch_size") == [12] * 2 + [now] * 4
    assert of(records, "learning_rate") == pytest.approx([3e-3 * (6 - step) / 6 for step in range(6)])
    assert resume.newest()["iteration"] == 6
    assert resume.newest()["consumed_samples"] == 24 + 4 * now
    said = (
        f" the global batch size was 12 and is {now}: the remaining 4 iterations read {4 * now} samples, "
        f"not 48; no sample is skipped or repeated; an evaluation reads {2 * now} samples, not 24\n"
    )
    assert said in capsys.readouterr().out


def test_a_batch_that_was_not_given_can_be_kept(
    resume: Resumed, read: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The default follows micro-batch size and ranks: 4 × 1, then 1 × 1."""
    resume("--micro-batch-size", "4", "--train-iters", "3", "--exit-interval", "2")
    resume("--train-iters", "3")
    assert read == list(range(9))
    hint = "was 4 and is 1 (--micro-batch-size × ranks; give --global-batch-size 4 to keep it): the remaining"
    assert hint in capsys.readouterr().out
    resume("--micro-batch-size", "4", "--train-iters", "3")  # nothing is left to read
    assert "global batch size was" not in capsys.readouterr().out


@pytest.mark.parametrize(("now", "steps"), [(12, 4), (48, 1)])
def test_a_run_in_samples_reads_them_all(
    resume: Resumed, read: list[int], capsys: pytest.CaptureFixture[str], now: int, steps: int
) -> None:
    """The learning rate follows the consumed samples; only the size of the steps changes."""
    resume("--global-batch-size", "24", "--train-samples", "96", "--exit-interval", "2")
    capsys.readouterr()
    records = resume("--global-batch-size", str(now), "--train-samples", "96")
    assert read == list(range(96))
    consumed = [0, 24, *range(48, 96, now)]
    assert of(records, "learning_rate") == pytest.approx([3e-3 * (96 - c) / 96 for c in consumed])
    assert resume.newest()["iteration"] == 2 + steps
    assert read_run(str(resume.save), None, on_cpus=True)[2] == 2 + steps  # as report shows it
    said = f"was 24 and is {now}: the remaining 48 samples are {steps} iterations, not 2; no sample"
    assert said in capsys.readouterr().out


def test_a_ramp_continues_from_the_consumed_samples(
    resume: Resumed, read: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier steps had other sizes than those of the ramp."""
    resume("--global-batch-size", "10", "--train-samples", "60", "--exit-interval", "1")
    capsys.readouterr()
    ramp = ["--global-batch-size", "12", "--rampup-batch-size", "4", "4", "24", "--train-samples", "60"]
    records = resume(*ramp)
    # 4 samples a step while fewer than 12 are consumed, 8 while fewer than 24
    assert of(records, "global_batch_size") == [10, 4, 8, 8, 12, 12]
    assert read == list(range(54))
    out = capsys.readouterr().out
    assert "was 10 and is 12 after a ramp from 4 by 4 over 24 samples: the remaining 50 samples are 5" in out
    assert "the global batch size" not in out.partition(" was 10 and is")[2]


@pytest.mark.parametrize("data", ["text", "megatron blend"])
def test_every_kind_of_data_supplies_what_is_asked_for(
    resume: Resumed,
    read: list[int],
    corpus: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: str,
) -> None:
    """Megatron-LM's order is still the one that was built for the first batch size."""
    kinds = {
        "text": ["--data-path", str(tmp_path / "text.jsonl"), "--append-eod"],
        "megatron blend": ["--data-path", "0.3", corpus, "0.7", corpus, "--dataset-order", "megatron"],
    }
    lines = (json.dumps({"text": " ".join(str(k * n % 256) for n in range(99))}) for k in range(40))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    flags = [*kinds[data], "--train-iters", "4"]
    if "megatron" in data:
        flags += ["--data-cache-path", str(tmp_path / "cache")]
    resume(*flags, "--global-batch-size", "8", "--exit-interval", "2")
    resume(*flags, "--global-batch-size", "2", "--exit-interval", "3")
    resume(*flags, "--global-batch-size", "1")
    assert read == list(range(19))
    assert resume.newest()["ordered_samples"] == (32 if "megatron" in data else None)
    assert "WARNING" not in capsys.readouterr().out


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
    state = json.loads((tmp_path / "a" / "iter_0000006" / "state.json").read_text())
    progress = state["progress"]["dataset_progress"]
    assert [(part["consumed_before"], part["weight"]) for part in progress["sets"]] == [(4, 3.0), (12, 1.0)]
    assert progress["since"] == 16
