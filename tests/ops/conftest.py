"""The kernels, built once in the user's cache and shared by all tests and runs."""

import shutil

import pytest
import torch

from megatron_zpp.ops.library import load_kernels


@pytest.fixture(scope="session")
def kernels() -> None:
    """Load the CPU kernels as torch.ops.megatron_zpp. Skips without g++, where runs use the reference."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, so no kernels")
    load_kernels("cpu", print)


DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu_core)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The devices whose kernels are compared with the reference; launch/test_gpu.sh runs those of a GPU."""
    load_kernels(request.param, print)
    return request.param
