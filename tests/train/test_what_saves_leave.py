"""What a run still holds of the saves that have ended: nothing in the store, nothing in its memory."""

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import small
from tests.faults.held import in_use
from tests.train.test_slow_storage import Quiet, config_of, saver_of
from tests.zero.ranks import on_ranks

WARM_UP, SAVES = 3, 6
LEAK = 16 * 2**10  # bytes per save on a rank; less is hard to tell from noise in so few saves


def save_again_and_again(topology: Topology, directory: str, *flags: str) -> tuple[list[int], list[int]]:
    """The keys in the store and the bytes in use on this rank, after each save."""
    store = dist.distributed_c10d._get_default_store()
    engine = small(topology=topology, zero_stage=3)
    saver = saver_of(engine, config_of("--save", directory, "--keep-last", "1", *flags), Quiet(), store)
    keys, used = [], []
    for number in range(1, WARM_UP + SAVES + 1):
        saver.save(Progress(number, number))
        saver.before_step()
        saver._wait()
        dist.barrier()
        keys.append(store.num_keys())
        used.append(in_use()["malloc_bytes"])
        dist.barrier()
    saver.finish()
    return keys, used


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["waiting", "async"])
def test_nothing_is_left_of_saves(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for keys, used in on_ranks(2, save_again_and_again, str(tmp_path), *flags):
        assert keys[-1] - keys[WARM_UP - 1] < SAVES, keys  # two more if ranks waited long in the last save
        assert used[-1] - used[WARM_UP - 1] < SAVES * LEAK, used
