"""The kernels, built once in the user's cache and shared by all tests and runs."""

import shutil

import pytest

from megatron_zpp.ops.library import load_kernels


@pytest.fixture(scope="session")
def kernels() -> None:
    """Load the CPU kernels as torch.ops.megatron_zpp. Skips without g++, where runs use the reference."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, so no kernels")
    load_kernels("cpu", print)
