"""The memory of copies that --async-save writes, against arithmetic on the parameters of the model."""

from dataclasses import replace

import pytest

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.plan.memory import copies_bytes, pinned_bytes
from tests.plan.jobs import FOUR_BITS, job_of
from tests.plan.test_memory import SPLIT

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=1, seq_length=8)


@pytest.mark.parametrize(("zero", "kinds", "on_cpu"), [({}, 3, 3), (FOUR_BITS, 4, 3)])
def test_a_node_copies_what_its_ranks_save(zero: dict, kinds: int, on_cpu: int) -> None:
    """Weights and moments, and the reference of differences; pinned unless the optimizer is on the CPU."""
    job = job_of(MODEL, 1000, zero=zero, nodes=2, local=4)
    shards = [4 * layout.shard_numel for layout in job.layouts]
    assert copies_bytes(job) == 4 * kinds * pinned_bytes(shards)
    assert copies_bytes(replace(job, save_optim=False)) == 4 * pinned_bytes(shards)
    offloaded = replace(job, zero=replace(job.zero, zero_offload_optimizer=True))
    assert copies_bytes(offloaded) == 4 * (on_cpu * sum(shards) + (kinds - on_cpu) * pinned_bytes(shards))


def test_compact_states_are_copied_as_they_are() -> None:
    """Weights as bf16 and a byte; moments as a byte, and one for each block of 128."""
    job = job_of(MODEL, 1000, optimizer=replace(SPLIT, exp_avg_sq_dtype="fp16"))
    shards = [layout.shard_numel for layout in job.layouts]
    sizes = [int(nbytes * numel) for nbytes in (2, 1, 1, 1 / 128, 2, 1 / 128) for numel in shards]
    assert copies_bytes(job) == pinned_bytes(sizes)


def test_pinned_copies_are_powers_of_two() -> None:
    assert pinned_bytes([]) == pinned_bytes([0]) == 0
    assert pinned_bytes([1, 3, 4, 5, 4096, 4097]) == 1 + 4 + 4 + 8 + 4096 + 8192
