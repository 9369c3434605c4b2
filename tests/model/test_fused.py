"""The Triton kernels of compiled layers where there is no GPU; tests/gpu/ has them on one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this machine")
def test_kernels_compute_what_torch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
