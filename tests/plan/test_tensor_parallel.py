"""The plan of ranks that share layers: against saved tensors, allocations and collectives of two ranks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.plan.activations import ends_bytes, stored_bytes
from megatron_zpp.plan.exchanges import exchanged_bytes, hidden_state_bytes
from megatron_zpp.plan.job import Job, UnconnectedGroup
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.zero import step_sums
from megatron_zpp.zero.engine import ZeroEngine
from tests.plan.jobs import FULL, NO_DROPOUT, engine_of, job_of
from tests.plan.test_memory import allocated_at_most, saved_bytes
from tests.support import GROUPED_FLASH
from tests.zero import engines
from tests.zero.ranks import on_ranks
from tests.zero.test_closed_forms import live_bytes

VOCAB, SAMPLES = 500, 4
GPT_2 = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, **NO_DROPOUT)
LLAMA = replace(
    GPT_2,
    group_query_attention=True,
    num_query_groups=2 if GROUPED_FLASH else 4,  # torch 2.8 keeps the scores of queries in groups on CPUs
    position_embedding_type="rope",
    swiglu=True,
    ffn_hidden_size=320,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
ACROSS = {"qk_layernorm_across_heads": True, "norm_placement": "after", "embed_layernorm": True}
MODELS = {"gpt2": GPT_2, "llama": LLAMA, "olmo2": replace(LLAMA, **ACROSS)}
SELECTIVE = {"recompute_granularity": "selective"}


@dataclass(frozen=True)
class Case:
    """A run of two tensor ranks, or of one rank."""

    model: str = "gpt2"
    recompute: str = "stored"
    precision: str = "bf16"
    stage: int = 0
    micro_batches: int = 1
    tensor: int = 2
    overlapped: bool = False

    def engine(self, topology: Topology) -> ZeroEngine:
        return engine_of(self.job(), topology)

    def job(self, **grid: int) -> Job:
        job = job_of(
            MODELS[self.model],
            VOCAB,
            zero={"zero_stage": self.stage},
            recompute=RECOMPUTE[self.recompute],
            precision=PrecisionConfig(**{self.precision: True}),
            micro_batch_size=SAMPLES,
            micro_batches=self.micro_batches,
            tensor=self.tensor,
            **{"local": self.tensor} | grid,
        )
        return replace(job, overlapped=self.overlapped)


IN_CHUNKS = {"mlp_chunks_for_training": 4}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "stored": {},
    "selective": SELECTIVE,
    "full": FULL,
    "stored, MLPs in chunks": IN_CHUNKS,
    "full, MLPs in chunks": FULL | IN_CHUNKS,
}
SAVED = [Case(model, recompute) for model in MODELS for recompute in ("stored", "selective", "full")]
SAVED += [Case(recompute="stored, MLPs in chunks"), Case(recompute="full, MLPs in chunks")]


def tokens_of(case: Case) -> torch.Tensor:
    model = MODELS[case.model]
    return torch.randint(VOCAB, (SAMPLES, model.seq_length + 1), generator=torch.Generator().manual_seed(1))


def saved_for_the_backward(topology: Topology, cases: list[Case]) -> list[int]:
    saved = []
    for case in cases:
        engine = case.engine(topology)
        forward = partial(engine.accumulate, tokens_of(case), index=0, micro_batches=1)
        saved.append(saved_bytes(forward, engine.model.parameters()))
        engine.close()
    return saved


def test_what_is_saved_for_the_backward_is_the_plans_and_half_as_much_on_two_ranks() -> None:
    """Within 1% of the plan; two ranks have at most 0.55 of what one rank has."""
    halves = on_ranks(2, saved_for_the_backward, SAVED)
    wholes = saved_for_the_backward(Topology(), [replace(case, tensor=1) for case in SAVED])
    assert halves[0] == halves[1]
    for case, half, whole in zip(SAVED, halves[0], wholes, strict=True):
        assert half <= 0.55 * whole
        for saved, job in ((half, case.job()), (whole, replace(case, tensor=1).job())):
            logits = job.dtype.itemsize * job.tokens * job.entries  # their gradient
            assert saved == pytest.approx(stored_bytes(job) + ends_bytes(job) + logits, rel=0.01)


STEPS = [
    Case("llama", "stored", micro_batches=2),
    Case(stage=3, recompute="full", micro_batches=2),
    Case(recompute="full", micro_batches=2, tensor=4),
    Case(recompute="full, MLPs in chunks", micro_batches=2),
]


class Mirrored(UnconnectedGroup):
    """Tensor ranks that all have what this one has: their collectives take the memory that real ones take.

    Frees on the threads of real collectives would be missing from torch's profile. `sent` counts the bytes
    that one of the ranks sends.
    """

    sent, name = 0, "mirrored"

    def start_gather(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent += (self.size - 1) * rows.nbytes
        return torch.cat([rows] * self.size)

    def start_scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent += (self.size - 1) * rows.nbytes // self.size
        return rows.chunk(self.size)[0] * self.size

    def gather_into(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        self.sent += (self.size - 1) * rows.nbytes
        out.view(self.size, *rows.shape).copy_(rows)

    def exchange_parts(self, parts: torch.Tensor) -> torch.Tensor:
        self.sent += (self.size - 1) * parts.nbytes // self.size
        return parts[self.rank].expand(parts.shape).contiguous()

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        return started

    def start_sum(self, value: torch.Tensor) -> torch.Tensor:
        """A reduce-scatter and an all-gather."""
        self.sent += 2 * (self.size - 1) * value.nbytes // self.size
        return value * self.size


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step_of_a_tensor_rank_allocates_what_the_plan_says(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3% of the memory above the states, and within 0.1% of the states."""
    monkeypatch.setattr(engines, "TensorGroup", lambda ranks, rank, **_: Mirrored(len(ranks)))
    monkeypatch.setattr(step_sums, "sum_over_ranks", lambda value, _: value)
    engine = case.engine(Topology(0, case.tensor, 0, case.tensor))
    peak = allocated_at_most(engine, tokens_of(case), case.micro_batches)
    states = live_bytes(engine)
    planned = memory_of(case.job())
    assert planned.resident == pytest.approx(states, rel=1e-3)
    assert planned.peak - planned.resident == pytest.approx(peak, rel=0.03)


EXCHANGED = [
    *SAVED,
    Case(precision="fp32", recompute="full"),
    Case("llama", "full", overlapped=True),
    Case(tensor=4, overlapped=True),
]


@pytest.mark.parametrize("case", EXCHANGED, ids=str)
def test_exchanges_are_the_collectives_of_a_micro_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte."""
    group = Mirrored(case.tensor)
    monkeypatch.setattr(engines, "TensorGroup", lambda ranks, rank, **_: group)
    monkeypatch.setattr(TensorGroup, "named", lambda name: group)
    engine = case.engine(Topology(0, case.tensor, 0, case.tensor))
    engine.accumulate(tokens_of(case), index=0, micro_batches=1)
    assert group.sent == exchanged_bytes(case.job())
    job = case.job()
    layers, rows = job.model.num_layers, job.rows * job.model.hidden_size * job.dtype.itemsize
    per_layer = {"full": 14, "stored, MLPs in chunks": 12, "full, MLPs in chunks": 14}
    collectives = per_layer.get(case.recompute, 10) * layers + 4
    assert hidden_state_bytes(job) == (case.tensor - 1) * collectives * rows
    assert exchanged_bytes(replace(case, tensor=1).job()) == 0
