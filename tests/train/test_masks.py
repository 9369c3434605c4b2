"""Runs with document masks: the loss of an independent reading, for any stage and ranks; kernels by flag."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.model.attention import DotProduct
from tests.model.variants import MODELS, flags_of
from tests.support import nightly, recorded, records_of
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import EOD, beginning_of, train_here

ALL = "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
PACKED = "--dataset-packing best-fit --data-cache-path".split()  # and a directory
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()


def record_of(path: Path, flags: list[str], *more: str, processes: int = 1) -> list[dict]:
    """The metrics of three steps and the evaluations around them."""
    command = [*flags, *NO_DROPOUT, "--global-batch-size", "8", "--train-iters", "3", *more]
    _, out = recorded(path, *command, processes=processes)
    assert ": positions restart, attention restarts" in out
    return records_of(path)


def losses_of(records: list[dict]) -> list[float]:
    return [value for record in records for name, value in record.items() if name.endswith("_loss")]


def valid_loss_by_hand(flags: list[str], count: int) -> float:
    """The loss of the initial weights per token: a forward per document; none where the input is its end."""
    model, splits = beginning_of([*flags, *NO_DROPOUT, "--train-iters", "3"])
    counted = []
    batch = splits.valid.batch(np.arange(count))
    if "--dataset-packing" in flags:
        begins = batch.documents[(batch.documents > 0) & (batch.documents < batch.tokens.size)]
        documents = zip(
            np.split(batch.tokens.ravel(), begins), np.split(batch.targets.ravel(), begins), strict=True
        )
    else:
        ends = [np.flatnonzero(row[:-1] == EOD) + 1 for row in batch]
        documents = (
            document
            for row, at in zip(batch, ends, strict=True)
            for document in zip(np.split(row[:-1], at), np.split(row[1:], at), strict=True)
        )
    for inputs, targets in documents:
        if len(inputs) and targets[0] != -100:
            with torch.no_grad():
                logits = model(torch.from_numpy(inputs)[None])[0]
            losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets), reduction="none")
            counted += losses[torch.from_numpy(inputs) != EOD].tolist()
    return float(np.mean(counted))


@pytest.mark.parametrize(("model", "packed"), [nightly("gpt2", False), ("llama", False), ("llama", True)])
def test_a_masked_run_is_the_same_for_any_stage_ranks_and_kernel(
    tmp_path: Path, flags: list[str], model: str, packed: bool
) -> None:
    flags, masks = [*flags, *flags_of(MODELS[model])], ALL
    if packed:
        flags, masks = [*flags, *PACKED, str(tmp_path / "packings")], ["--calculate-per-token-loss"]
    alone = record_of(tmp_path / "alone", flags, *masks)
    assert alone[0]["valid_loss"] == pytest.approx(valid_loss_by_hand(flags, 16), rel=1e-5)
    assert len(losses_of(alone)) == 6  # valid, three steps, valid, test
    others = (
        "--recompute-granularity full --recompute-method uniform --attention-backend unfused --zero-stage 3"
    )
    sharded = record_of(tmp_path / "sharded", flags, *masks, *others.split(), processes=2)
    assert losses_of(sharded) == pytest.approx(losses_of(alone), rel=1e-5)


def test_an_evaluation_in_which_no_token_counts_has_no_loss(corpus: str, tmp_path: Path) -> None:
    ends, metrics = str(tmp_path / "ends"), tmp_path / "metrics"
    with IndexedDatasetWriter(ends, np.dtype(np.uint16)) as writer:
        writer.add_document(np.full(100, EOD, np.uint16))
    data = ["--train-data-path", corpus, "--valid-data-path", ends, "--eod-mask-loss"]
    train_here([*BYTES, *TINY, *data, "--train-iters", "1", "--metrics-file", str(metrics)])
    assert {record["valid_loss"] for record in records_of(metrics) if "valid_loss" in record} == {None}


def test_a_kernel_that_was_forced_is_logged_and_tried_with_windows(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*flags, *NO_DROPOUT, "--train-iters", "1", "--attention-backend", "flash"]
    train_here([*run, "--position-embedding-type", "rope", "--no-rope-freq", "2"])
    assert "\n rope in 1 of 2 layers\n attention: flash_attention\n" in capsys.readouterr().out
    monkeypatch.setattr(DotProduct, "bounds", Mock(side_effect=RuntimeError("no such kernel")))
    with pytest.raises(ValueError, match=r"flash: cannot compute 32 tokens.* --window-size 3,0 in .*no such"):
        train_here([*run, "--window-size", "3,0"])
