"""The real run: the baseline and our program train alike in fp32, also where calls end before they do."""

import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_run import run as real_run
from benchmarks.real_run.result import read
from tests.support import run

SETTINGS = (
    "--variants plain stage_0 --size tiny --micro-batch-size 4 --global-batch-size 8 --device cpu --fp32 "
    "--eval-interval 10 --eval-iters 2 --saving-seconds 0 --least-seconds 0"
).split()
STEPS = 20


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives of a small corpus of two training parts and two held-out sources."""
    corpus = tmp_path_factory.mktemp("corpus")
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, 97 + draw.integers(26, size=size))) for size in draw.integers(2, 9, size=200)]

    def document() -> str:
        return " ".join(words[index] for index in draw.geometric(0.05, size=300) % len(words))

    for name, sources in (("training", ["x"]), ("held_out", ["a", "b"])):
        with (corpus / f"{name}.jsonl").open("w") as file:
            for index in range(60):
                file.write(json.dumps({"text": document(), "source": sources[index % len(sources)]}) + "\n")
    made = run("benchmarks/corpus/make_tokens.py", "--corpus", corpus, "--entries", "384", "--parts", "2")
    assert made.returncode == 0, made.stderr
    (corpus / "archives").mkdir()
    for name in ("common", "training-00", "training-01"):
        with tarfile.open(corpus / f"archives/{name}.tar.xz", "w:xz") as archive:
            for path in (corpus / "tokens").iterdir():
                if path.name.startswith(("vocab", "merges", "held_out") if name == "common" else name):
                    archive.add(path, path.name)
    return corpus / "archives"


def train(folder: Path, archives: Path, *flags: str, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    """A call of run.py."""
    million = str((steps * 8 * 64 + 1) / 1e6)
    command = ["benchmarks/real_run/run.py", "--tokens", folder / "tokens", "--work", folder / "work"]
    command += ["--output", folder / "output", "--archives", archives, "--million-tokens", million]
    return run(*command, "--parts", "2", *SETTINGS, *flags)


@pytest.mark.nightly
def test_baseline_and_ours_have_the_same_losses(tmp_path: Path, archives: Path) -> None:
    """In fp32 they differ by the order of sums: some units in the last place of a loss near 6."""
    assert train(tmp_path, archives).returncode == 0
    (plain, held_out), (ours, ours_held_out) = (
        read(tmp_path / "output" / f"{name}.jsonl") for name in ("plain", "stage_0")
    )
    assert list(plain) == list(ours) == list(range(1, STEPS + 1))
    for step, record in plain.items():
        assert record["learning_rate"] == pytest.approx(ours[step]["learning_rate"], rel=1e-12)
        assert record["lm_loss"] == pytest.approx(ours[step]["lm_loss"], rel=2e-6)
        assert record["grad_norm"] == pytest.approx(ours[step]["grad_norm"], rel=1e-5)
    assert plain[STEPS]["lm_loss"] < plain[1]["lm_loss"] - 0.1  # else equal losses would say nothing
    assert held_out == pytest.approx({step: ours_held_out[step] for step in held_out}, rel=2e-6)


@pytest.mark.nightly
def test_processes_that_end_early_continue_to_the_same_losses(tmp_path: Path, archives: Path) -> None:
    """Each process of the baseline has a tenth of a second, and so takes one step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--variants", "plain"]
    assert train(whole, archives, *flags, steps=4).returncode == 0
    pressed = train(parts, archives, *flags, "--seconds", "0", "--least-seconds", "-1000", steps=4)
    assert pressed.stdout.count("plain: iterations") == 4
    losses, again = (
        [step["lm_loss"] for step in read(folder / "output/plain.jsonl")[0].values()]
        for folder in (whole, parts)
    )
    assert losses == again


@pytest.mark.nightly
def test_a_call_without_all_parts_only_unpacks(tmp_path: Path, archives: Path) -> None:
    first = tmp_path / "archives"
    first.mkdir()
    for name in ("common", "training-00"):
        (first / f"{name}.tar.xz").write_bytes((archives / f"{name}.tar.xz").read_bytes())
    assert train(tmp_path, first).returncode == real_run.STOPPED
    assert (tmp_path / "tokens/training-00_text_document.bin").exists()
    assert not (tmp_path / "work/plain/plain.jsonl").exists()
