"""Tensor ranks × data ranks × ZeRO stages learn what one process does (1909.08053, 2205.05198)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.support import nightly
from tests.zero.engines import engine_of, model_of, operations, states_of, weights_of
from tests.zero.ranks import on_ranks

VOCAB, SAMPLES = 250, 4
GPT_2 = model_of(num_layers=3, num_attention_heads=4, ffn_hidden_size=52, seq_length=12)
LLAMA = replace(
    GPT_2,
    group_query_attention=True,
    num_query_groups=4,
    num_attention_heads=8,
    kv_channels=10,
    position_embedding_type="longrope",
    yarn_original_max_position_embeddings=8,  # of 12 tokens, but more than a document has
    longrope_short_factor=(1.0,) * 4,
    longrope_long_factor=(2.0,) * 4,
    rotary_percent=0.8,
    rotary_interleaved=True,
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
SCORES = replace(  # 12 heads, of which ALiBi has slopes of two kinds
    GPT_2,
    group_query_attention=True,
    num_query_groups=4,
    num_attention_heads=12,
    position_embedding_type="alibi",
    softmax_type="learnable",
    attn_logit_softcapping=1.0,
    init_method_std=0.2,
)
ACROSS = {"qk_layernorm": True, "qk_layernorm_across_heads": True}
OLMO_2 = replace(LLAMA, **ACROSS, norm_placement="after", embed_layernorm=True)
GPT_2_ACROSS = replace(GPT_2, **ACROSS, apply_layernorm_1p=True, embed_layernorm=True)  # two sums per token
FP32, BF16 = PrecisionConfig(fp32=True), PrecisionConfig(bf16=True)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**10)
ALL = (
    ("zero_quantized_weights", True),
    ("zero_quantized_gradients", True),
    ("zero_hpz_partition_size", "auto"),
)
FOUR_BITS = (("zero_quantized_weights_format", "delta4"), ("zero_quantized_gradients_format", "rotated4"))
PLAIN = {"gpt2": GPT_2, "llama": LLAMA}
MODELS = PLAIN | {"olmo2": OLMO_2, "gpt2-across": GPT_2_ACROSS, "scores": SCORES}
MODELS |= {
    "sums": replace(LLAMA, fp32_residual_connection=True),
    "windows": replace(LLAMA, window_size="2,0"),
    "wide": replace(GPT_2, window_size="9,0"),
}
RECOMPUTE = {
    "stored": RecomputeConfig(),
    "selective": RecomputeConfig(recompute_activations=True),
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
}
RECOMPUTE |= {
    f"{kind}, MLPs in chunks": replace(RECOMPUTE[kind], mlp_chunks_for_training=2)
    for kind in ("stored", "full")
}


@dataclass(frozen=True)
class Case:
    """One run of `steps` steps on SAMPLES samples."""

    model: str = "gpt2"
    tensor: int = 1
    stage: int = 0
    recompute: str = "stored"
    accumulate: int = 1
    precision: PrecisionConfig = FP32
    dropout: float = 0.0
    documents: bool = False
    overlapped: bool = False
    zero: tuple[tuple[str, Any], ...] = ()
    kernels: bool = False  # of csrc/, which AdamW has on GPUs
    layers: int = 3
    steps: int = 2
    context: int = 1
    comm: str = "auto"
    tokens: int = 12  # of a sample


def build(case: Case, topology: Topology) -> ZeroEngine:
    return engine_of(
        replace(
            MODELS[case.model],
            num_layers=case.layers,
            hidden_dropout=case.dropout,
            attention_dropout=case.dropout if case.context == 1 else 0.0,
            seq_length=case.tokens,
            max_position_embeddings=case.tokens,
        ),
        VOCAB,
        zero=ZeroConfig(**{"zero_stage": case.stage} | dict(case.zero)),
        recompute=RECOMPUTE[case.recompute],
        precision=case.precision,
        topology=topology,
        tensor=case.tensor,
        context=case.context,
        comm_type=case.comm,
        overlapped=case.overlapped,
        operations=operations() if case.zero or case.kernels else None,
    )


@dataclass(frozen=True)
class Trained:
    """Losses of all steps and of an evaluation, and norms of the first gradient and of the last."""

    losses: list[float]
    norms: tuple[float, float]
    gradient: dict[str, list[float]]  # the first step's, by parameter; on rank 0


def train(topology: Topology, cases: tuple[Case, ...]) -> list[Trained]:
    return [train_engine(build(case, topology), case) for case in cases]


def train_engine(engine: ZeroEngine, case: Case) -> Trained:
    """Train an engine of a case, and close it."""
    shape = case.steps, SAMPLES, case.tokens + 1
    data = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(8))
    mine = slice(engine.mesh.data_rank, None, engine.mesh.data_ranks)
    losses, norms, gradient = [], [], {}
    for step, samples in enumerate(data):
        micro_batches = samples[mine].chunk(case.accumulate)
        total = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            torch.manual_seed(1000 * step + 10 * index + engine.mesh.tensor_rank)
            total += engine.accumulate(
                inside_documents(batch) if case.documents else batch,
                index=index,
                micro_batches=len(micro_batches),
            )
        norms.append(engine.step(1e-3).grad_norm.item())
        losses.append(engine.mean_over_ranks(total / len(micro_batches)).item())
        if step == 0:  # (1 - beta1) times the clipped gradient
            first = states_of(engine, "exp_avg")
            gradient = {name: state.flatten().tolist() for name, state in first.items()}
    losses.append(engine.mean_over_ranks(engine.evaluate(data[0])).item())
    weights_of(engine)  # asserts that replicated parameters have the same bits on all tensor ranks
    engine.close()
    return Trained(losses, (norms[0], norms[-1]), gradient if engine.topology.rank == 0 else {})


def inside_documents(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arguments of a model whose samples hold documents of five tokens."""
    samples, tokens = len(batch), batch.shape[1] - 1
    positions = (torch.arange(tokens) % 5).expand(samples, tokens)
    starts = [sample * tokens + first for sample in range(samples) for first in range(0, tokens, 5)]
    ends = torch.tensor([*starts, samples * tokens], dtype=torch.int32)
    return batch[:, :-1], batch[:, 1:], positions, ends


@cache
def one_process(case: Case) -> Trained:
    return train(Topology(), (case,))[0]


def same_on_all(found: list[list[Trained]]) -> list[Trained]:
    """What the first rank found, if all have the same losses and norms."""
    first, *others = found
    for other in others:
        assert [(each.losses, each.norms) for each in other] == [(each.losses, each.norms) for each in first]
    return first


def check(case: Case, found: Trained, *, rel: float) -> None:
    """Losses, norms and the first gradient, which is compared by its norm as a whole."""
    same = {name: getattr(case, name) for name in ("documents", "tokens", "layers", "steps")}
    expected = one_process(Case(case.model, **same))
    assert found.losses == pytest.approx(expected.losses, rel=rel), case
    assert found.norms == pytest.approx(expected.norms, rel=10 * rel), case
    assert found.gradient.keys() == expected.gradient.keys()
    names = sorted(expected.gradient)
    ours, theirs = (torch.tensor([*chain(*map(each.gradient.get, names))]) for each in (found, expected))
    assert torch.linalg.norm(ours - theirs) <= rel * torch.linalg.norm(theirs), case


def check_all(ranks: int, cases: Sequence[Case]) -> None:
    """Each case is trained on so many ranks to what one process finds, but for the order of fp32 sums."""
    for case, found in zip(cases, same_on_all(on_ranks(ranks, train, tuple(cases))), strict=True):
        check(case, found, rel=1e-6)


@pytest.mark.parametrize(
    ("tensor", "data"), [(2, 2), *(nightly(*ranks) for ranks in ((1, 2), (2, 1), (4, 1), (4, 2)))]
)
def test_every_stage_learns_what_one_process_does(tensor: int, data: int) -> None:
    """Within what the order of fp32 sums leaves. Other numbers of ranks are nightly."""
    cases = tuple(Case(model, tensor, stage, layers=2, steps=3) for stage in range(4) for model in PLAIN)
    cases += (Case("olmo2", tensor, 3, layers=2, steps=3), Case("gpt2-across", tensor, 0, layers=2, steps=3))
    check_all(tensor * data, cases)


def test_recomputation_accumulation_and_overlap_change_nothing() -> None:
    """Also where documents end inside samples."""
    cases = (
        Case("gpt2", 2, 0, recompute="full", accumulate=2),
        Case("llama", 2, 2, recompute="selective", accumulate=2),
        Case("gpt2", 2, 3, recompute="full"),
        Case("llama", 2, 3, recompute="full", accumulate=2),
        Case("llama", 2, 3, documents=True),
        Case("scores", 2, 1, recompute="selective", documents=True),
        Case("gpt2", 2, 0, recompute="stored, MLPs in chunks", documents=True, overlapped=True),
        Case("llama", 2, 3, recompute="full, MLPs in chunks", accumulate=2),
        Case("llama", 2, 3, recompute="full", accumulate=2, overlapped=True),
        Case("olmo2", 2, 2, recompute="full", accumulate=2, documents=True, overlapped=True),
    )
    check_all(4, cases)


def test_16_bits_learn_within_their_rounding() -> None:
    """Losses of all steps; bf16 has 8 bits, fp16 has 11, and an optimizer step of 1e-3 hardly more."""
    cases = (
        Case("gpt2", 2, 0, precision=BF16),
        Case("llama", 2, 3, precision=BF16),
        Case("sums", 2, 3, precision=FP16, recompute="full, MLPs in chunks"),
        Case("olmo2", 2, 3, precision=BF16),
    )
    for case, found in zip(cases, on_ranks(4, train, cases)[0], strict=True):
        rel = 2**-8 if case.precision is BF16 else 2**-11
        assert found.losses == pytest.approx(one_process(Case(case.model)).losses, rel=rel), case


@pytest.mark.parametrize(("model", "stage", "overlapped"), [("llama", 3, False), ("gpt2", 0, True)])
def test_tensor_ranks_drop_out_of_tokens_of_their_own_and_recomputation_repeats_it(
    model: str, stage: int, overlapped: bool
) -> None:
    stored, again, without = (
        Case(model, 2, stage, recompute=recompute, dropout=dropout, overlapped=overlapped)
        for recompute, dropout in (("stored", 0.1), ("full", 0.1), ("stored", 0.0))
    )
    for kept, recomputed, whole in on_ranks(2, train, (stored, again, without)):
        assert kept == recomputed
        assert kept.losses != whole.losses


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), nightly(8, 4)])
def test_zeropp_acts_over_data_ranks(ranks: int, ranks_per_node: int) -> None:
    """Two nodes of one or two data ranks each, two tensor ranks per data rank; all ranks see the same."""
    kinds = (("llama", ALL, False), ("llama", ALL, True), ("gpt2", ALL + FOUR_BITS, False))
    cases = tuple(
        Case(model, 2, 3, recompute="full", zero=zero, overlapped=overlapped)
        for model, zero, overlapped in kinds
    )
    first = same_on_all(on_ranks(ranks, train, cases, ranks_per_node=ranks_per_node))
    for case, found in zip(cases, first, strict=True):
        expected = one_process(Case(case.model))
        assert found.losses == pytest.approx(expected.losses, rel=2**-6), case
        assert found.losses[-1] < found.losses[0]


UNSUMMED = Case("gpt2", 2, 0, kernels=True)


def states_of_gradients(topology: Topology) -> list[set[str]]:
    """Of units but the embedding, after the backward of one micro-batch and after a step."""
    engine = build(UNSUMMED, topology)
    data = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(8))
    engine.accumulate(data, index=0, micro_batches=1)
    found = [{unit.grad.state.name for unit in engine.units[1:]}]
    engine.step(1e-3)
    engine.close()
    return [*found, {unit.grad.state.name for unit in engine.units[1:]}]


def test_replicated_gradients_are_summed_beside_the_rest_of_the_backward() -> None:
    """Where data ranks sum nothing: they are waited for in the step, whose result is that of one process."""
    for found in on_ranks(2, states_of_gradients):
        assert found == [{"REDUCING"}, {"EMPTY"}]
    cases = (UNSUMMED, replace(UNSUMMED, model="llama", recompute="full"))
    check_all(2, cases)
