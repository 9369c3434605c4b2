"""Fixtures: the command-line tool, and checkpoints that megatron-core wrote, with the logits of its model."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import ROOT, environment

Saved = Callable[[str, int], Path]
Tool = Callable[..., str]
TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "89")  # 90 entries with the end of document
_PROGRAM = Path(__file__).with_name("megatron_program.py")


@pytest.fixture
def tool(tool: Tool) -> Tool:
    """Run `megatron-zpp import` with arguments, after those of a tokenizer, and return what it prints."""
    return partial(tool, "import", *TOKENIZER)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a family's checkpoints by tensor ranks; see megatron_program.py."""
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed; tests/requirements.txt names it"
    )
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share them, as megatron-core takes long to start
        shared = shared.parent
    root = shared / "megatron"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)  # of a worker that failed
            command = [sys.executable, str(_PROGRAM), str(root)]
            places = environment(PYTHONWARNINGS="ignore")
            done = subprocess.run(command, cwd=ROOT, env=places, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-2000:]
            (root / "complete").touch()
    return lambda family, ranks: root / f"{ranks}" / family
