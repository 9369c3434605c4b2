"""launch/quickstart.sh: from nothing to text, a second call that continues, and a Llama beside it."""

import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, environment

SHORT = ("--train-iters", "2", "--log-interval", "1", "--eval-iters", "1")


def quickstart(work: Path, *flags: str) -> str:
    done = subprocess.run(
        [ROOT / "launch" / "quickstart.sh", *flags],
        env=environment(QUICKSTART_DIR=str(work)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def check_what_is_next(said: str, work: Path) -> None:
    """The commands that the script ends with run as they are; those that train get flags of a short run."""
    text = said.partition("\nNext, ")[2].replace("\\\n", " ")
    commands = [
        line for line in text.splitlines() if line.startswith(("python", "source", "QUICKSTART_DIR="))
    ]
    assert [line.split()[0] for line in commands] == [
        "source",
        "python",
        *2 * [f"QUICKSTART_DIR={work}"],
        "python",
    ]
    script = "\n".join(
        line.partition(" --train-iters")[0] + " --exit-interval 1 " + " ".join(SHORT)
        if "quickstart.sh" in line
        else line
        for line in commands
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for found in ("--- sample 2 ---\nclass Error", "the run is complete", "=== [", "inter_node_bytes"):
        assert found in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_calls_make_one_run_and_a_llama_is_beside_it(tmp_path: Path) -> None:
    first = quickstart(tmp_path, *SHORT, "--exit-interval", "1")
    assert "starting from initial weights" in first
    second = quickstart(tmp_path, *SHORT)
    assert second.count("already there") == 3
    assert "resuming at iteration 1, 8 samples" in second
    assert " validation loss at iteration 2 on test set | lm loss value: " in second
    assert "--- sample 2 ---" in second
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.html").read_text()
    assert report.startswith("<!doctype html>")
    assert "<h2>Text that the model wrote</h2>" in report
    assert report.count("<pre>class Reader") == 2  # at the start and at the end
    llama = quickstart(tmp_path, *SHORT, "--arch", "llama")
    assert llama.count("already there") == 3
    assert "4 heads in 2 groups" in llama
    assert "starting from initial weights" in llama
    for name in ("loss-llama.png", "report-llama.html", "sample-llama.txt", "checkpoints-llama"):
        assert (tmp_path / name).exists()
    check_what_is_next(second, tmp_path)


@pytest.mark.parametrize("flags", [["--arch", "bert"], ["--arch"]])
def test_another_arch_is_refused(flags: list[str]) -> None:
    done = subprocess.run([ROOT / "launch" / "quickstart.sh", *flags], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("quickstart.sh: error: --arch ")
    assert done.stderr.endswith(": must be gpt2 or llama\n")
