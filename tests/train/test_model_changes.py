"""A resumed run says which model flags give the loaded weights another meaning; one may be forgotten."""

from pathlib import Path

import pytest

from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, train_here

LLAMA = "--position-embedding-type rope --rotary-base 500 --window-size 7,0 --normalization RMSNorm"
MEANING = "the weights are those of another model"


def test_flags_that_change_no_shape_are_named_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = str(tmp_path / "save")
    shape = ["--mock-data", *BYTES, *TINY, *SMALLEST]
    train_here([*shape, *LLAMA.split(), "--save", save, "--train-iters", "2", "--exit-interval", "1"])

    def warnings(*flags: str) -> list[str]:
        capsys.readouterr()
        train_here([*shape, *flags, "--load", save, "--train-iters", "2"])
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix(" WARNING: ") for line in lines if "WARNING" in line]

    of_the_run = "--init-method-std 0.1 --max-position-embeddings 64 --attention-dropout 0"
    assert warnings(*LLAMA.split(), *of_the_run.split()) == []
    forgotten = "--position-embedding-type none --normalization RMSNorm --num-attention-heads 4".split()
    expected = [
        f"--num-attention-heads was 1 and is 4: {MEANING}",
        f"--kv-channels was 16 and is 4: {MEANING}",
        f"--num-query-groups was 1 and is 4: {MEANING}",
        f"--window-size was 7,0 and is not given: {MEANING}",
        f"--position-embedding-type was rope and is none: {MEANING}",
        f"--rotary-base was 500.0 and is not given: {MEANING}",
        f"--rotary-percent was 1.0 and is not given: {MEANING}",
        f"--squared-relu was not given and is given: {MEANING}",
    ]
    assert sorted(warnings(*forgotten, "--squared-relu")) == sorted(expected)
    longer = LLAMA.replace("500", "9000").split()
    assert warnings(*longer, "--finetune") == [f"--rotary-base was 500.0 and is 9000.0: {MEANING}"]
