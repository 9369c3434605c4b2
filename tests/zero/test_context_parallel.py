"""Context ranks × tensor ranks × data ranks × ZeRO stages learn what one process does."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from megatron_zpp.distributed.comm_stream import TrafficLedger
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.context.dropout import PlacedDropout
from megatron_zpp.model.context.parts import chunks_of, from_parts, own_part
from tests.support import nightly
from tests.zero.ranks import on_ranks
from tests.zero.test_tensor_parallel import (
    ALL,
    BF16,
    FOUR_BITS,
    FP16,
    VOCAB,
    Case,
    build,
    check_all,
    one_process,
    same_on_all,
    train,
)

LONG: dict[str, Any] = {"tokens": 16, "layers": 2}
COMMS = ("a2a", "p2p")


def case_of(model: str, tensor: int, stage: int, context: int, comm: str, **more: Any) -> Case:
    return Case(model, tensor, stage, context=context, comm=comm, **(LONG | more))


@pytest.mark.parametrize(
    ("context", "tensor", "data", "both"),
    [
        (2, 2, 1, False),
        *(nightly(*ranks, True) for ranks in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (4, 2, 1))),
    ],
)
def test_every_stage_learns_what_one_process_does(context: int, tensor: int, data: int, both: bool) -> None:
    """Within what the order of fp32 sums leaves; nightly with both ways to communicate at each stage."""
    models = ("llama", "gpt2") if 4 % (context * tensor) == 0 else ("llama", "llama")
    cases = tuple(
        case_of(models[stage % 2], tensor, stage, context, comm, steps=20 if both else 3)
        for stage in range(4)
        for comm in (COMMS if both else COMMS[stage // 2 :][:1])
    )
    check_all(context * tensor * data, cases)


@pytest.mark.parametrize("other", [False, nightly(True)])
def test_documents_windows_scores_and_recomputation_change_nothing(other: bool) -> None:
    """Two context and two data ranks. The wide window is longer than a rank's part of a sample."""
    kinds: tuple[tuple[Any, ...], ...] = (
        ("windows", 3, "p2p", "stored", 1, False),
        ("windows", 0, "a2a", "full", 2, True),
        ("wide", 1, "a2a", "stored", 1, False),
        ("scores", 1, "a2a", "selective", 1, False),
        ("scores", 3, "p2p", "full", 2, True),
        ("llama", 2, "p2p", "full, MLPs in chunks", 2, True),
    )
    cases = tuple(
        case_of(model, 1, stage, 2, comm, recompute=recompute, accumulate=times, documents=documents)
        for model, stage, comm, recompute, times, documents in kinds
    )
    if other:
        cases = tuple(replace(case, comm=COMMS[case.comm == "a2a"]) for case in cases)
    check_all(4, cases)


def test_zeropp_and_16_bits_act_over_context_ranks() -> None:
    """Two nodes of two context ranks, between and inside which states are sharded."""
    hpz = (("zero_hpz_partition_size", "auto"),)
    kinds = ((ALL, "gpt2", "a2a"), (ALL + FOUR_BITS, "llama", "p2p"), (hpz, "llama", "a2a"))
    cases = tuple(case_of(model, 1, 3, 2, comm, recompute="full", zero=zero) for zero, model, comm in kinds)
    for precision in (BF16, FP16):
        cases += (case_of("llama", 1, 2, 2, "p2p", precision=precision),)
    first = same_on_all(on_ranks(4, train, cases, ranks_per_node=2))
    for case, found in zip(cases, first, strict=True):
        expected = one_process(Case(case.model, **LONG))
        rel = 1e-6 if case.zero == hpz else 2**-6
        assert found.losses == pytest.approx(expected.losses, rel=rel), case
        assert found.losses[-1] < found.losses[0]


def test_masks_of_dropout_do_not_depend_on_the_ranks() -> None:
    """Two samples of eight tokens, cut among 1, 2 or 4 ranks, of which tensor ranks may have halves."""
    masks = []
    for ranks in (1, 2, 4):
        parts = []
        for rank in range(ranks):
            torch.manual_seed(5)
            parts.append(PlacedDropout(0.4, 8, ranks, rank)(torch.ones(2, 8 // ranks, 500)))
        masks.append(from_parts(torch.stack([chunks_of(part) for part in parts])))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    kept = masks[0] != 0
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.02)
    assert masks[0][kept].unique().tolist() == pytest.approx([1 / 0.6])
    rows = kept.flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)
    torch.manual_seed(5)
    half = PlacedDropout(0.4, 8, 2, 1, tensor_rank=1)(torch.ones(4, 500))
    assert torch.equal(half, own_part(masks[0], 2, 1).flatten(0, 1)[4:])


def test_recomputation_repeats_dropout_and_grids_and_chunks_draw_alike() -> None:
    case = case_of("gpt2", 1, 3, 2, "a2a", dropout=0.1)
    others = [replace(case, recompute=kind) for kind in ("full", "full, MLPs in chunks")]
    two = on_ranks(2, train, (case, *others, replace(case, dropout=0.0)))
    for kept, recomputed, chunked, whole in two:
        assert kept == recomputed
        assert chunked.losses == pytest.approx(kept.losses, rel=1e-6)
        assert kept.losses != whole.losses
    ((four,), *_) = on_ranks(4, train, (replace(case, context=4, stage=1),))
    assert four.losses == pytest.approx(two[0][0].losses, rel=1e-6)


def test_the_ledger_has_what_the_collectives_sent() -> None:
    """Counted apart: each exchange is called with its bytes recorded."""
    for found in on_ranks(2, _traffic):
        for counted, sent in found:
            assert counted == sent > 0


def _traffic(topology: Topology) -> list[tuple[int, int]]:
    """Bytes of exchanges by a ledger of their own, beside that of gradients, and those that were sent."""
    found = []
    for model, recompute in product(("llama", "scores"), ("stored", "selective", "full")):
        engine = build(case_of(model, 1, 0, 2, "a2a", recompute=recompute), topology)
        group, sent = engine.model.attention._group, []
        engine._exchanges._ledger = ledger = TrafficLedger(engine.mesh)

        def recorded(exchange: Any, parts: torch.Tensor, sent: list[int] = sent) -> torch.Tensor:
            sent.append(parts.nbytes // 2)
            return exchange(parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "exchange_parts", partial(recorded, group.exchange_parts))
            engine.accumulate(torch.randint(VOCAB, (2, 17)), index=0, micro_batches=1)
        engine.close()
        found.append((ledger.intra_node, sum(sent)))
    return found
