"""Checkpoints that megatron-core wrote, with the logits of its model."""

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

    @cache
    def make(ranks: int) -> Path:
        root, port = tmp_path_factory.mktemp(f"ranks_{ranks}"), free_port()
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
        return root

    return lambda family, ranks: make(ranks) / family
