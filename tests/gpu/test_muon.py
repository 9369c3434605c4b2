"""Muon on GPUs, over NCCL: the CPU's cases."""

import pytest

from tests.gpu.ranks import on_gpus
from tests.zero import test_muon as cases


@pytest.mark.parametrize("stage", [0, 3])
def test_updates_are_those_of_float64(stage: int) -> None:
    for rank in on_gpus(1, 2, cases.found, {"zero_stage": stage}, True, "cuda", share_one_gpu=True):
        cases.check(rank, *cases.expected(3, nesterov=True))
