"""A short run of the fuzzer; `python benchmarks/faults/fuzz.py --seconds 3600` is a long one."""

import json
from pathlib import Path

import pytest

from benchmarks.faults.fuzz import fuzz
from benchmarks.faults.readers import READERS, Reader
from tests.support import run

EXAMPLES = 50


@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_changed_files_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    counts = fuzz(reader, tmp_path, EXAMPLES, number=1)
    assert counts["executions"] >= EXAMPLES * 0.9
    assert counts["refused"] > 0
    assert counts["read"] > 0


@pytest.mark.nightly
def test_the_program_adds_up_what_its_workers_ran(tmp_path: Path) -> None:
    argv = ("--reader", "provenance", "--seconds", "1", "--output", tmp_path)
    done = run("benchmarks/faults/fuzz.py", *argv)
    assert done.returncode == 0, done.stderr
    total = json.loads((tmp_path / "fuzzing.json").read_text())["figures"]["total"]
    assert total["executions"] > 0
    assert total["failures"] == 0
