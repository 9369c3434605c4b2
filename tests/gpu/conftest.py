"""Everything below needs a GPU: launch/test_gpu.sh runs it, elsewhere it is skipped."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder's tests, and no others, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no GPU; launch/test_gpu.sh runs these on one"))
