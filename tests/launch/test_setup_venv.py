"""launch/setup_venv.sh: what it asks pip for, of a pip that only writes down how it was called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_zpp.version import TORCH_TESTED
from tests.support import ROOT, environment

INDEX = "https://download.pytorch.org/whl/cpu"
STUB = """#!/usr/bin/env bash
case "$*" in
    --version) echo Python 3.12.0 ;;
    "-m venv .venv") mkdir -p .venv/bin .venv/lib && cp "$0" .venv/bin/python ;;
    *" index versions torch "*) exit "$NO_ANSWER" ;;
    *" install "*) echo "$*" >>calls && cat .venv/installing.txt >>calls ;;
esac
"""
NO_GPU = not any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg"))


class Setup:
    """A repository of the script and its requirements alone."""

    def __init__(self, directory: Path) -> None:
        self.root, self.calls = directory, directory / "calls"
        (directory / "launch").mkdir()
        for name in ("launch/setup_venv.sh", "requirements.txt"):
            shutil.copy(ROOT / name, directory / name)
        for name in ("python", "nvidia-smi"):
            path = directory / name / name
            path.parent.mkdir()
            path.write_text(STUB)
            path.chmod(0o755)

    def run(self, *arguments: str, gpu: bool, answers: bool = True) -> str:
        path = os.pathsep.join([str(self.root / "nvidia-smi")] * gpu + ["/usr/bin", "/bin"])
        place = environment(
            PATH=path, PYTHON=str(self.root / "python/python"), NO_ANSWER=str(int(not answers))
        )
        script = self.root / "launch" / "setup_venv.sh"
        done = subprocess.run([script, *arguments], env=place, capture_output=True, text=True)
        return done.stdout + done.stderr


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("answers", "said"), [(True, "torch is the build for CPUs"), (False, "does not answer")]
)
def test_without_a_gpu_torch_is_the_build_for_cpus(setup: Setup, answers: bool, said: str) -> None:
    out = setup.run("requirements.txt[run,plots]", gpu=False, answers=answers)
    call, *packages = setup.calls.read_text().splitlines()
    assert said in out
    assert (f"--extra-index-url {INDEX}" in call) == answers
    assert answers or f"pip install --index-url {INDEX} {packages[0]}" in out
    assert packages[0].startswith(f"torch=={TORCH_TESTED[0][0]}.")
    assert packages[-1].startswith("matplotlib")
    assert not [each for each in packages if each.startswith(("wandb", "datasets", "pytest"))]
    assert setup.run("requirements.txt[run,plots]", gpu=False) == ""  # once per content


def test_with_a_gpu_pip_chooses_torch_and_a_file_is_installed_whole(setup: Setup) -> None:
    out = setup.run("requirements.txt", gpu=True)
    call, *packages = setup.calls.read_text().splitlines()
    assert "GPU" not in out
    assert "index-url" not in call
    assert {"torch", "sentencepiece", "wandb", "datasets", "pytest"} <= {
        each.replace(">", "=").split("=")[0] for each in packages
    }


@pytest.mark.parametrize("wanted", ["requirements.txt[run,nothing]", "nothing.txt"])
def test_a_group_or_file_that_is_not_there_is_refused(setup: Setup, wanted: str) -> None:
    assert f"setup: {wanted}: no such file or group" in setup.run(wanted, gpu=True)
    assert not setup.calls.exists()
