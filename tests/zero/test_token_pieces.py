"""Tokens that tensor ranks share in pieces: who has which, what starts before what, what is learned."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.config.tensor_parallel import OVERLAPPED, TokenPieces
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.tensor_exchanges import Gather, GatheredLinear, LinearScattered, ScatterSum
from megatron_zpp.model.tensor_parallel import TensorParallelComponents
from tests.zero.ranks import on_ranks
from tests.zero.test_tensor_parallel import ALL, PIECES, VOCAB, Case, build, check, one_process, train

INPUTS, OUTPUTS = 5, 8
SHAPES = [(2, 1), (2, 3), (2, 4), (4, 2)]  # ranks and pieces, of twelve tokens per rank


@pytest.mark.parametrize(
    ("tokens", "ranks", "pieces"),
    [(16384, 2, 4), (4096, 8, 4), (4104, 4, 3), (3072, 2, 3), (2048, 2, 2), (2052, 8, 1), (2046, 2, 1)],
)
def test_pieces_are_as_many_as_divide_tokens_and_are_long_enough(
    tokens: int, ranks: int, pieces: int
) -> None:
    assert OVERLAPPED.of(tokens, ranks) == pieces
    assert TokenPieces().of(tokens, ranks) == 1


class Member(TensorGroup):
    """One of some ranks, without a communicator."""

    def __init__(self, rank: int, size: int) -> None:
        self.ranks, self.size, self.rank = tuple(range(size)), size, rank


@pytest.mark.parametrize(("ranks", "pieces"), SHAPES)
def test_a_rank_has_its_part_of_each_piece(ranks: int, pieces: int) -> None:
    tokens = 12 * ranks
    own = [
        TensorParallelComponents(
            group=Member(rank, ranks), tokens=tokens, pieces=TokenPieces(most=pieces, least=1)
        ).own_positions(torch.arange(tokens)[None], torch.zeros(1, tokens))
        for rank in range(ranks)
    ]
    share = 12 // pieces
    for rank, positions in enumerate(own):
        firsts = [piece * share * ranks + rank * share for piece in range(pieces)]
        assert positions.tolist() == [first + index for first in firsts for index in range(share)]


@dataclass
class Comparison:
    """Differences between what this rank computes in fp64 and what it should."""

    largest: list[float] = field(default_factory=list)

    def add(self, out: Tensor, wanted: Tensor, gradient: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
        """`pairs`: leaves of this rank, and what `gradient` of `out` becomes in them."""
        ours = torch.autograd.grad(out, [leaf for leaf, _ in pairs], gradient)
        for one, other in ((out, wanted), *zip(ours, (other for _, other in pairs), strict=True)):
            assert one.shape == other.shape
            self.largest.append((one - other).abs().max().item())


def differences(topology: Topology, pieces: int) -> list[float]:
    """The largest differences from what one process computes of the parts of all ranks."""
    torch.set_num_threads(1)
    ranks, rank = topology.world_size, topology.rank
    group, generator = TensorGroup(range(ranks), rank), torch.Generator().manual_seed(5)
    tokens, compared = 12 * ranks, Comparison()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def own(whole: Tensor) -> Tensor:
        """Those rows that this rank has."""
        return torch.cat([piece.chunk(ranks)[rank] for piece in whole.chunk(pieces)])

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    hidden, weights, bias = drawn(tokens, INPUTS), drawn(ranks, OUTPUTS, INPUTS), drawn(OUTPUTS)
    back = drawn(ranks, tokens, OUTPUTS).detach()  # the gradient of each rank's outputs
    whole = torch.stack([F.linear(hidden, weight, bias) for weight in weights])
    of_hidden, of_weights = torch.autograd.grad(whole, (hidden, weights), back)
    mine, weight = leaf(own(hidden)), leaf(weights[rank])
    out = GatheredLinear.apply(mine, weight, bias, pieces, group)
    expected = (mine, own(of_hidden)), (weight, of_weights[rank]), (bias, back[rank].sum(0))
    compared.add(out, whole[rank], back[rank], *expected)
    out = Gather.apply(mine, pieces, group)
    compared.add(out, hidden, back[rank, :, :INPUTS], (mine, own(back[:, :, :INPUTS].sum(0))))

    inner, weights, back = drawn(ranks, tokens, INPUTS), drawn(ranks, OUTPUTS, INPUTS), back[0]
    whole = sum(F.linear(part, weight) for part, weight in zip(inner, weights, strict=True))
    of_inner, of_weights = torch.autograd.grad(whole, (inner, weights), back)
    mine, weight = leaf(inner[rank]), leaf(weights[rank])
    out = LinearScattered.apply(mine, weight, pieces, group)
    compared.add(out, own(whole), own(back), (mine, of_inner[rank]), (weight, of_weights[rank]))
    out = ScatterSum.apply(mine, pieces, group)
    compared.add(out, own(inner.sum(0)), own(back[:, :INPUTS]), (mine, back[:, :INPUTS]))
    return compared.largest


@pytest.mark.parametrize(("ranks", "pieces"), SHAPES)
def test_exchanges_and_products_in_pieces_are_those_of_whole_tensors(ranks: int, pieces: int) -> None:
    for found in on_ranks(ranks, differences, pieces):
        assert len(found) == 11
        assert max(found) < 1e-12


class Recorder(TorchDispatchMode):
    """The order of products, of the exchanges that a group starts, and of waits for them."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.calls: list[str] = []
        group.start_gather_into = self._started("gather", group.start_gather_into)
        group.start_scatter_sum_into = self._started("scatter", group.start_scatter_sum_into)

    def take(self) -> list[str]:
        """The calls since the last `take`."""
        calls, self.calls = self.calls, []
        return calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.calls.append("product")
        return func(*args, **kwargs or {})

    def _started(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(out: Tensor, rows: Tensor) -> Any:
            self.calls.append(name)
            work = start(out, rows)
            return SimpleNamespace(wait=lambda: (self.calls.append(f"wait for {name}"), work.wait()))

        return started


def order(topology: Topology) -> list[list[str]]:
    """Of the forward and the backward of both kinds of maps."""
    torch.set_num_threads(1)
    group = TensorGroup(range(topology.world_size), topology.rank)
    found, recorder = [], Recorder(group)
    rows, inner = torch.ones(12, INPUTS), torch.ones(24, INPUTS)
    weight = torch.ones(OUTPUTS, INPUTS, requires_grad=True)
    with recorder:
        for apply in (
            lambda: GatheredLinear.apply(rows.requires_grad_(), weight, None, 3, group),
            lambda: LinearScattered.apply(inner.requires_grad_(), weight, 3, group),
        ):
            out = apply()
            found.append(recorder.take())
            out.backward(torch.ones_like(out))
            found.append(recorder.take())
    return found


def test_exchanges_are_started_before_the_products_beside_which_they_run() -> None:
    """A product waits for its own piece alone; no scatter is waited for before the last product."""
    gathers, scatters = ["gather"] * 3, ["scatter"] * 3
    gathered, scattered = ["wait for gather"] * 3, ["wait for scatter"] * 3
    each = ["wait for gather", "product"] * 3
    for found in on_ranks(2, order):
        assert found == [
            [*gathers, *each],
            [*gathers, "product", *scatters, *gathered, "product", *scattered],
            [*["product", "scatter"] * 3, *scattered],
            [*gathers, *each, "product"],
        ]


def test_every_kind_of_run_learns_what_one_process_does() -> None:
    cases = (
        Case("gpt2", 2, 0, documents=True, pieces=PIECES),
        Case("llama", 2, 3, "full", accumulate=2, pieces=PIECES),
        Case("llama", 2, 2, "selective", pieces=PIECES),
    )
    first, *others = on_ranks(4, train, cases)
    for other in others:
        assert [(each.losses, each.norms) for each in other] == [(each.losses, each.norms) for each in first]
    for case, found in zip(cases, first, strict=True):
        check(case, found, rel=1e-6)


def test_four_tensor_ranks_learn_what_one_process_does() -> None:
    case = Case("llama", 4, 1, "full", pieces=PIECES)
    check(case, on_ranks(4, train, (case,))[0][0], rel=1e-6)


def test_recomputation_repeats_dropout_and_zeropp_acts_over_data_ranks() -> None:
    stored, again = (Case("gpt2", 2, 0, kind, dropout=0.1, pieces=PIECES) for kind in ("stored", "full"))
    quantized = Case("llama", 2, 3, "full", zero=ALL, pieces=PIECES)
    for kept, recomputed, zeropp in on_ranks(4, train, (stored, again, quantized), ranks_per_node=2):
        assert kept == recomputed
        assert zeropp.losses == pytest.approx(one_process(Case("llama")).losses, rel=2**-6)


def logits(topology: Topology, case: Case) -> list[float]:
    """Of the token after the fifth, with one sample: another number of tokens than in training."""
    torch.set_num_threads(1)
    engine = build(case, topology)
    found = engine.next_token_logits(torch.arange(12)[None] * 7 % VOCAB, after=5).tolist()
    engine.close()
    return found


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_text_is_continued_as_by_one_process(model: str) -> None:
    expected = logits(Topology(), Case(model))
    for found in on_ranks(2, logits, Case(model, 2, 3, pieces=PIECES)):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
