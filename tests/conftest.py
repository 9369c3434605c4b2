"""The order of files, which matters where several workers share them: the longest first; and Ctrl-C."""

import signal
from pathlib import Path

import pytest

# One of these that began last would leave the other workers without work.
LONGEST = (
    "slurm/test_jobs.py",
    "zero/test_stages.py",
    "zero/test_tensor_parallel.py",
    "checkpoint/foreign/test_megatron.py",
    "checkpoint/foreign/test_deepspeed.py",
    "checkpoint/test_tensor_parallel.py",
    "faults/test_harness.py",
    "train/test_faults.py",
    "launch/test_quickstart.py",
    "package/test_install.py",
    "data/text/test_shards.py",
    "train/test_pretrain.py",
    "zero/test_closed_forms.py",
    "launch/test_emulate_nodes.py",
    "faults/test_bad_inputs.py",
    "faults/test_fuzz.py",
    "supervision/test_preflight.py",
)


def pytest_configure() -> None:
    """A shell that starts programs in its background has them ignore Ctrl-C, and theirs after them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
