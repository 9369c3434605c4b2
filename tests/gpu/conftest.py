"""Everything below needs a GPU: launch/test_gpu.sh runs it, elsewhere it is skipped."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_zpp.train.setup.determinism import fix_order_of_sums

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once, at a process's first product


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests as `gpu_core` unless they are `gpu_long`; skip them where there is no GPU."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("gpu_long") is None:
            item.add_marker("gpu_core")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU; launch/test_gpu.sh runs these on one"))


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    """Several workers and the processes of their tests share a GPU: none keeps what it does not use."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums have a fixed order, also in what is compiled, in all threads; after the test all is as before."""
    from torch._inductor import config

    settings = config._config
    if "deterministic" in settings:  # from torch 2.10 on; the variable of its default has been read already
        monkeypatch.setattr(settings["deterministic"], "default", True)
    variables, filled = set(os.environ), torch.utils.deterministic.fill_uninitialized_memory
    fix_order_of_sums(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    for name in set(os.environ) - variables:
        del os.environ[name]
