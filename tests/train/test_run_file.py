"""config.yaml in --save: a run that it repeats has the same losses."""

from pathlib import Path

import pytest

from megatron_zpp.config.root import parse_args
from megatron_zpp.train.setup.run_file import RUN_FILE
from tests.support import logged
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, train_here


def test_every_run_with_save_writes_the_file_that_repeats_it(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data-path", corpus, "--split", "100,0,0", *BYTES, *TINY, *SMALLEST, "--train-iters", "3"]
    train_here([*flags, "--save", "run", "--metrics-file", "first.jsonl"])
    file = f"run/{RUN_FILE}"
    train_here(["--config", file, "--save", "again", "--metrics-file", "second.jsonl"])
    assert logged("first.jsonl") == logged("second.jsonl")
    assert len(logged("first.jsonl")) == 3
    saved, again = parse_args(["--config", file]), parse_args(["--config", f"again/{RUN_FILE}"])
    assert saved.model == again.model
    assert (saved.checkpoint.save, again.checkpoint.save) == ("run", "again")
