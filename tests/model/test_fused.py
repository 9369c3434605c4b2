"""The Triton kernels of compiled layers where there is no GPU; tests/gpu/ has them on one."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def version() -> tuple[int, ...]:
    """Of Triton; (0,) where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


@pytest.mark.skipif(version() < (3, 7), reason="needs Triton 3.7, whose interpreter takes numpy's scalars")
def test_kernels_compute_what_torch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
