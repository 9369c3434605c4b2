"""A Llama-like model under ZeRO and ZeRO++: every stage learns what one process does, four bits included."""

from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.distributed.topology import Topology
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import VOCAB, build

LLAMA = ModelConfig(  # no size is a multiple of ranks or blocks
    num_layers=3,
    hidden_size=36,
    num_attention_heads=3,
    group_query_attention=True,
    kv_channels=14,
    ffn_hidden_size=50,
    seq_length=10,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0,
    attention_dropout=0,
)
ALL: dict[str, Any] = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": "auto",
}
FOUR_BITS = {"zero_quantized_weights_format": "delta4", "zero_quantized_gradients_format": "rotated4"}


def losses(topology: Topology, settings: list[dict[str, Any]]) -> list[list[float]]:
    """The mean loss of six steps with each of the settings; all grids see the same four samples."""
    data = torch.randint(VOCAB, (2, 4, 11), generator=torch.Generator().manual_seed(8))
    found = []
    for zero in settings:
        engine = build(topology, zero, PrecisionConfig(), LLAMA)
        found.append([])
        for step in range(6):
            mine = data[step % 2].chunk(topology.world_size)[topology.rank]
            loss = engine.accumulate(mine, index=0, micro_batches=1)
            engine.step(1e-2)
            found[-1].append(engine.mean_over_ranks(loss).item())
        engine.close()
    return found


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    return losses(Topology(), [{"zero_stage": 0}])[0]


def test_every_stage_learns_what_one_process_does(one_process: list[float]) -> None:
    """Up to the order of fp32 sums."""
    stages = [{"zero_stage": stage} for stage in range(4)]
    for ranks in on_ranks(4, losses, stages, ranks_per_node=2):
        for found in ranks:
            assert found == pytest.approx(one_process, rel=1e-5)


def test_zeropp_learns_a_llama(one_process: list[float]) -> None:
    """Within the rounding of int4 gradients, and equally on all ranks."""
    first, *others = on_ranks(4, losses, [ALL, ALL | FOUR_BITS], ranks_per_node=2)
    assert all(other == first for other in others)
    for found in first:
        assert found == pytest.approx(one_process, rel=2**-4)
        assert found[-1] < 0.9 * found[0]
