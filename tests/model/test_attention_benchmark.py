"""The benchmark of attention, on a CPU and in small."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import attention
from benchmarks.attention import EOD, Texts
from megatron_zpp.config.options import parse_options

TINY = (
    "--shapes 2x8 --seq-lengths 32 --tokens 64 --step-preset 345m --step-layers 1 --step-hidden-size 64 "
    "--step-seq-length 32 --micro-batch-size 2 --calls 1 --rounds 1"
)


def test_it_has_a_figure_or_a_reason_for_each_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/attention.py", *TINY.split(), "--output", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attention.main()
    figures = json.loads((tmp_path / "attention.json").read_text())["figures"]
    rows = {(row["backend"], row["documents"]): row for row in figures["kernels"]}
    assert set(rows) == {(name, masked) for name in attention.BACKENDS for masked in (False, True)}
    for (backend, _), row in rows.items():
        if backend in ("auto", "math", "flash"):
            assert row["milliseconds"] > 0
        else:
            assert row["refused"].startswith(f"--attention-backend {backend}: ")
    step = figures["step"]
    milliseconds = step["milliseconds"]
    assert step["rate_of_documents_over_whole"] == pytest.approx(
        milliseconds["whole"] / milliseconds["documents"], rel=1e-2
    )
    assert step["tokens_per_second"]["whole"] == pytest.approx(
        64_000 / milliseconds["whole"], rel=1e-2, abs=1
    )


def test_its_documents_are_a_quarter_of_a_sample_on_average() -> None:
    tokens = Texts(1024).batch(np.arange(200))
    assert (tokens == EOD).mean() == pytest.approx(4 / 1024, rel=0.1)
    assert tokens.max() < attention.VOCABULARY


def test_a_shape_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--shapes 16: must be heads × width, as in 16x64$"):
        parse_options(attention.Settings, "attention.py", "", ["--shapes", "16"])
