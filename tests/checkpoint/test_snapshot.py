"""A save behind the training holds the states of its step, whatever the training does next."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from megatron_zpp.checkpoint.snapshot import Snapshot
from tests.checkpoint.test_read_back import RUN
from tests.train.in_process import train_here


def test_a_step_waits_until_the_states_being_saved_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, saved = Snapshot._copy, []

    def slowly(snapshot: Snapshot, tensors: Mapping[str, Tensor], *, on_gpu: bool) -> None:
        time.sleep(0.2)  # longer than a step takes
        copy(snapshot, tensors, on_gpu=on_gpu)

    monkeypatch.setattr(Snapshot, "_copy", slowly)
    for number, flags in enumerate(([], ["--async-save"])):
        save = tmp_path / str(number)
        run = [*RUN, "--save-interval", "1", "--keep-last", "9", "--train-iters", "3", "--save", str(save)]
        assert train_here([*run, *flags]).stop is None
        saved.append([path.read_bytes() for path in sorted(save.glob("iter_*/rank_00000.safetensors"))])
    assert len({*saved[0]}) == 3
    assert saved[0] == saved[1]
