"""The plan of samples that context ranks share: by hand, beside what a run counts, and in the search."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.build import build_model, exchanges_of
from megatron_zpp.plan.activations import layer_bytes
from megatron_zpp.plan.exchanges import hidden_state_bytes
from megatron_zpp.plan.hardware import GPUS
from megatron_zpp.plan.job import Job, UnconnectedGroup
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.search import longest_sample, search
from megatron_zpp.plan.space import with_samples_of
from tests.plan.jobs import FULL, NO_DROPOUT, job_of
from tests.plan.test_search import rates

H100 = GPUS["h100"].memory
SMALL = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=64, **NO_DROPOUT)
IN_CHUNKS = {"mlp_chunks_for_training": 32}
TRIPLE = FULL | {"recompute_num_layers": 2}
STAGE_3 = {"zero_stage": 3}


def small(context: int = 2, comm_type: str = "a2a", **settings: Any) -> Job:
    job = job_of(SMALL, 100, **{"local": 2, "zero": STAGE_3} | settings)
    return replace(job, context=context, comm_type=comm_type)


def test_a_rank_has_half_of_a_sample_and_of_the_states() -> None:
    """Attention's output is there twice with all-to-all: 64 numbers of 2 bytes for each of 32 tokens."""
    shared, data = small(), small(context=1)
    assert (shared.tokens, shared.samples_per_step, shared.mesh.shard_ranks) == (32, 1, 2)
    assert layer_bytes(shared) == layer_bytes(data) // 2 + 32 * 64 * 2
    assert layer_bytes(small(comm_type="p2p")) == layer_bytes(data) // 2
    for part in ("weights", "optimizer", "buffers", "gradients"):
        assert getattr(memory_of(shared), part) == getattr(memory_of(data), part)
    assert shared.layouts == data.layouts  # so what one saves the other loads


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective"}, TRIPLE | IN_CHUNKS])
@pytest.mark.parametrize(("comm_type", "tensor"), [("a2a", 1), ("p2p", 1), ("a2a", 2)])
def test_exchanges_are_those_that_a_run_counts(
    recompute: dict[str, Any], comm_type: str, tensor: int
) -> None:
    """To the byte, of all ranks."""
    counted = 0
    settings = RecomputeConfig(**recompute)
    for rank in range(2):
        groups = {"context": UnconnectedGroup(2, rank), "group": UnconnectedGroup(2) if tensor == 2 else None}
        model = build_model(SMALL, 128, settings, comm_type=comm_type, **groups)
        times = [(1, 1)] * len(model.units())
        for units in model.recomputed_units():
            times[units.start : units.stop] = [(2, 1)] * len(units)
        for sent, (forward, backward) in zip(exchanges_of(model), times, strict=True):
            counted += forward * sent[0] + backward * sent[1]
    job = small(comm_type=comm_type, recompute=recompute, local=2 * tensor, tensor=tensor)
    assert 2 * hidden_state_bytes(job) == counted * job.rows * 2


def long(tokens: int, recompute: dict[str, Any] | None = None, context: int = 1, local: int = 2) -> Job:
    """1.3B at stage 3 with a sample of so many tokens for each GPU."""
    lengths = {"seq_length": tokens, "max_position_embeddings": tokens, "position_embedding_type": "rope"}
    model = ModelConfig(model_preset="1.3b", **NO_DROPOUT, **lengths)
    job = job_of(model, 50257, zero=STAGE_3, local=local, recompute=recompute, micro_batches=context)
    return replace(job, context=context, compiled=True)


def test_the_longest_sample_fits_and_a_longer_one_does_not() -> None:
    """256k tokens on one GPU, in 40 GiB with offloaded checkpoints; twice as many on two."""
    recomputed = FULL | IN_CHUNKS
    found = {}
    for context, local in ((1, 1), (2, 2)):
        job = long(2048, recomputed, context, local)
        found[context] = longest_sample(job, H100)
        step = 1024 * context
        assert memory_of(with_samples_of(job, found[context])).fits(H100)
        assert not memory_of(with_samples_of(job, found[context] + step)).fits(H100)
        offloaded = long(2**18 * context, recomputed | {"recompute_offload": True}, context, local)
        assert memory_of(offloaded).peak <= 40 * 2**30
    assert found[1] >= 2**18
    assert found[2] >= max(2**19, 1.9 * found[1])
    lengths = ({"max_position_embeddings": most, "seq_length": most} for most in (2048, 4096))
    short, whole = (
        job_of(ModelConfig(model_preset="1.3b", **NO_DROPOUT, **each), 50257, recompute=FULL)
        for each in lengths
    )
    assert memory_of(with_samples_of(short, 4096)) == memory_of(whole)  # with a table of learned positions


@pytest.mark.parametrize(("tokens", "context"), [(2**13, 1), (2**16, 2), (2**19, 2)])
def test_a_search_lets_ranks_share_samples_that_do_not_fit(tokens: int, context: int) -> None:
    best = search(long(tokens), rates(), H100).best
    assert best.job.context == context
    assert best.job.samples_per_step == 2
