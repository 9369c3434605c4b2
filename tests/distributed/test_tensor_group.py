"""Collectives of a group over gloo, several of them in flight."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.distributed.tensor_group import TensorGroup
from tests.support import forked


def gathers_beside_sums() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, rows = TensorGroup([0], 0), torch.ones(8, 1)
    for _ in range(5000):
        started = [start(rows) for _ in range(16) for start in (group.start_gather, group.start_sum)]
        for each in started:
            group.wait(each)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_gathers_beside_sums_leave_the_heap_whole() -> None:
    """Both threads of a gloo group write its last operation's name, without a lock.

    glibc ended most runs within 2,000 rounds when start_gather took an operation whose name is on the heap.
    """
    forked(gathers_beside_sums, stdout=os.devnull)
