"""launch/quickstart.sh, in the files of launch/Dockerfile's image: from nothing to text, and what is next."""

from pathlib import Path

import pytest

from tests.launch.image import build
from tests.support import ROOT, executed

SHORT = "--train-iters 2 --eval-iters 1".split()


def shell(image: Path, script: str, **variables: str) -> str:
    argv = ("bash", "-euo", "pipefail", "-c", script)
    done = executed(*argv, cwd=image, timeout=280, PYTHONPATH="", **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_image_has_the_files_that_its_stages_run(tmp_path: Path) -> None:
    assert build(tmp_path) == {"QUICKSTART_DIR": "/work"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_calls_make_one_run_and_a_llama_is_beside_it(tmp_path: Path) -> None:
    image, work = tmp_path / "image", tmp_path / "work"
    build(image)
    (image / ".venv").symlink_to(ROOT / ".venv")

    def quickstart(*flags: str) -> str:
        return shell(image, " ".join(["launch/quickstart.sh", *flags]), QUICKSTART_DIR=str(work))

    first = quickstart(*SHORT, "--exit-interval", "1")
    assert "starting from initial weights" in first
    second = quickstart(*SHORT)
    assert second.count("already there") == 3
    assert "resuming at iteration 1, 8 samples" in second
    assert " validation loss at iteration 2 on test set | lm loss value: " in second
    assert "--- sample 2 ---" in second
    assert (work / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (work / "report.html").read_text()
    assert report.startswith("<!doctype html>")
    assert report.count("<pre>class Reader") == 2  # at the start and at the end
    llama = quickstart(*SHORT, "--arch", "llama")
    assert llama.count("already there") == 3
    assert "4 heads in 2 groups" in llama
    assert "starting from initial weights" in llama
    for name in ("loss-llama.png", "report-llama.html", "sample-llama.txt", "checkpoints-llama"):
        assert (work / name).exists()

    following = second.partition("\nNext, ")[2].partition("\n")[2].partition("\nYour own text")[0]
    said = shell(image, following)
    for found in ("--- sample 2 ---\nclass Error", "4/       4 |", "the run is complete", "H100"):
        assert found in said


def test_help_installs_nothing() -> None:
    assert executed("launch/quickstart.sh", "--help").stdout.startswith("From nothing to text")


@pytest.mark.parametrize("flags", [["--arch", "bert"], ["--arch"]])
def test_another_arch_is_refused(flags: list[str]) -> None:
    done = executed("launch/quickstart.sh", *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("quickstart.sh: error: --arch ")
    assert done.stderr.endswith(": must be gpt2 or llama\n")
