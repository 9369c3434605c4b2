"""Reading metrics files: what is none is refused in a line, and at once."""

import os
from pathlib import Path

import pytest

from megatron_zpp.commands.plot import LINE_LIMIT, read_metrics


def test_reads_records(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(
        '{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2, "lm_loss": 2.0}\n'
    )
    assert [record["iteration"] for record in read_metrics(str(tmp_path / "run.jsonl"))] == [1, 2]


def test_a_fifo_and_a_line_without_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="is a FIFO, not a regular file"):
        read_metrics(str(tmp_path / "fifo"))
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1000 * LINE_LIMIT)  # zeros, of which the first line's limit is read
    with pytest.raises(ValueError, match="long:1: not a line of a metrics file"):
        read_metrics(str(tmp_path / "long"))
