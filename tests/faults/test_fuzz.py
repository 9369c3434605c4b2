"""A short run of the fuzzer; `python benchmarks/faults/fuzz.py --seconds 3600` is a long one."""

from pathlib import Path

import pytest

from benchmarks.faults.fuzz import fuzz
from benchmarks.faults.readers import READERS, Reader

EXAMPLES = 50


@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_changed_files_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    counts = fuzz(reader, tmp_path, EXAMPLES, number=1)
    assert counts["executions"] >= EXAMPLES * 0.9
    assert counts["refused"] > 0
    assert counts["read"] > 0
