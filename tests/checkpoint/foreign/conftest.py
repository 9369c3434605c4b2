"""Checkpoints that megatron-core wrote, with the logits of its model."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT, environment, free_port

Saved = Callable[[str, int], Path]
_PROGRAM = Path(__file__).with_name("megatron_program.py")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a family's checkpoints by tensor ranks; see megatron_program.py."""
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed; tests/requirements.txt names it"
    )

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share them, as megatron-core takes long to start
        shared = shared.parent

    @cache
    def make(ranks: int) -> Path:
        root = shared / f"megatron_{ranks}"
        with root.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / "complete").exists():
                shutil.rmtree(root, ignore_errors=True)  # of a worker that failed
                write(root, ranks)
                (root / "complete").touch()
        return root

    def write(root: Path, ranks: int) -> None:
        port = free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(root), str(ranks), str(rank), str(port)],
                cwd=ROOT,
                env=environment(PYTHONWARNINGS="ignore"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=200)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), errors[0][-2000:]

    return lambda family, ranks: make(ranks) / family
