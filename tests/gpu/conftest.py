"""Everything below needs a GPU: launch/test_gpu.sh runs it, elsewhere it is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


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
