"""launch/setup_venv.sh: what it asks pip for, of a pip that only writes down how it was called."""

import shutil
from pathlib import Path

import pytest

from tests.support import ROOT, executed

INDEX = "https://download.pytorch.org/whl/cpu"
STUB = """#!/usr/bin/env bash
case "$*" in
    --version) echo Python 3.12.0 ;;
    "-m venv .venv") mkdir -p .venv/bin .venv/lib && cp "$0" .venv/bin/python && cp "$0" .venv/bin/pip ;;
    *" index versions torch "*) [[ $ANSWERS ]] ;;
    *" install "*) echo "$*" >>calls && cat .venv/installing.txt >>calls ;;
esac
"""
NO_GPU = not any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg"))


def setup(root: Path, wanted: str, *, gpu: bool = False, answers: bool = True) -> tuple[str, str, list[str]]:
    """What the script says in a repository of its own, how it calls pip, and for which packages."""
    for name in ("launch/setup_venv.sh", "requirements.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name in ("python", "nvidia-smi") if gpu else ("python",):
        (root / name).write_text(STUB)
        (root / name).chmod(0o755)
    place = {"PATH": f"{root}:/usr/bin:/bin", "PYTHON": "python", "ANSWERS": "yes" * answers}
    done = executed(root / "launch/setup_venv.sh", wanted, **place)
    call, *packages = (root / "calls").read_text().splitlines() if (root / "calls").exists() else [""]
    return done.stdout + done.stderr, call, packages


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("answers", [True, False])
def test_without_a_gpu_torch_is_the_build_for_cpus(answers: bool, tmp_path: Path) -> None:
    said, call, packages = setup(tmp_path, "requirements.txt[run,plots]", answers=answers)
    assert (f"--extra-index-url {INDEX}" in call) == ("torch is the build for CPUs" in said) == answers
    assert answers or f"pip install --index-url {INDEX} {packages[0]}" in said
    assert (packages[0][:7], packages[-1][:10]) == ("torch==", "matplotlib")
    assert not [each for each in packages if each.startswith(("wandb", "datasets", "pytest"))]
    assert setup(tmp_path, "requirements.txt[run,plots]")[0] == ""  # once per content


def test_with_a_gpu_pip_chooses_torch_and_a_file_is_installed_whole(tmp_path: Path) -> None:
    said, call, packages = setup(tmp_path, "requirements.txt", gpu=True)
    assert "GPU" not in said
    assert "index-url" not in call
    names = {each.replace(">", "=").split("=")[0] for each in packages}
    assert {"torch", "sentencepiece", "wandb", "datasets", "pytest"} <= names


def test_an_environment_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    setup(tmp_path, "requirements.txt[run]")
    (tmp_path / ".venv/bin/pip").unlink()
    assert "setup: creating .venv" in setup(tmp_path, "requirements.txt[run]")[0]


@pytest.mark.parametrize("wanted", ["requirements.txt[run,nothing]", "nothing.txt"])
def test_a_group_or_file_that_is_not_there_is_refused(wanted: str, tmp_path: Path) -> None:
    said, call, _ = setup(tmp_path, wanted)
    assert f"setup: {wanted}: no such file or group" in said
    assert call == ""
