"""Ring attention on ranks of this machine against attention of whole samples in one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.context import travel
from megatron_zpp.model.context.parts import own_part, places
from megatron_zpp.model.context.ring import Ring
from megatron_zpp.model.context.rounds import rounds
from megatron_zpp.model.flex import Flex
from megatron_zpp.model.scores import Scores, alibi_slopes
from tests.support import nightly
from tests.zero.ranks import on_ranks

CHUNK, WIDTH, BATCH = 10, 8, 2
KINDS = ("", "cap", "slopes sinks")  # of scores
HEADS = ((3, 3), (6, 2))  # and groups; 2 and 4 divide neither 3 heads nor the heads of a group
WINDOWS = (None, 1, 7, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 4)
CASES = [
    (heads, window, documents, kind)
    for heads in HEADS
    for window in WINDOWS
    for documents in (False, True)
    for kind in KINDS
]


def scores_of(kind: str, heads: int, sinks: Tensor) -> Scores:
    return Scores(
        0.4 if "cap" in kind else None,
        1.5 if "cap" in kind else None,
        alibi_slopes(heads, 0, heads, sinks.device) if "slopes" in kind else None,
        sinks if "sinks" in kind else None,
    )


def drawn(
    ranks: int, heads: int, groups: int, dtype: torch.dtype, chunk: int = CHUNK, width: int = WIDTH
) -> list[Tensor]:
    """Queries, keys, values and what the outputs are multiplied by, (B, S, …), and sinks."""
    draw, tokens = torch.Generator().manual_seed(7), 2 * ranks * chunk
    counts = (heads, groups, groups, heads)
    shapes = [(BATCH, tokens, count, width) for count in counts] + [(heads,)]
    return [torch.randn(shape, generator=draw, dtype=torch.double).to(dtype) for shape in shapes]


def ends_of(tokens: int, chunk: int) -> Tensor:
    """Of documents that begin and end around ends of chunks and rows, one of which is a token long."""
    ends = [0, 3, chunk, chunk + 1, tokens - 1, tokens, tokens + 5 * chunk // 2, 2 * tokens, 2 * tokens]
    return torch.tensor(ends, dtype=torch.int32)


def results(attend: Any, inputs: list[Tensor], kind: str) -> list[Tensor]:
    """The output of `attend(q, k, v, scores=)`, and the gradients of q, k, v and sinks."""
    *qkv, weights, sinks = inputs
    qkv = [part.detach().requires_grad_() for part in qkv]
    sinks = sinks.detach().requires_grad_()
    out = attend(*qkv, scores=scores_of(kind, len(sinks), sinks))
    wanted = [*qkv, *[sinks] * ("sinks" in kind)]
    return [out, *torch.autograd.grad(out, wanted, weights.to(out.dtype))]


def error(
    ring: Ring,
    group: TensorGroup,
    case: tuple,
    dtype: torch.dtype = torch.double,
    chunk: int = CHUNK,
    width: int = WIDTH,
    device: str = "cpu",
    around: Any = lambda attend: attend,
) -> float:
    """The largest difference to attention of whole samples, relative where elements are above 1.

    `around` makes another function of the ring's, for instance a graph.
    """
    (heads, groups), window, documents, kind = case
    inputs = [part.to(device) for part in drawn(group.size, heads, groups, dtype, chunk, width)]
    oracle, ends = DotProduct("math"), ends_of(inputs[0].shape[1], chunk).to(device) if documents else None
    whole = [part.double() for part in inputs]
    mask = oracle.mask(whole[0], window, ends)
    expected = results(partial(oracle, dropout=0.0, mask=mask), whole, kind)
    own = partial(own_part, ranks=group.size, rank=group.rank)
    *parts, sinks = inputs
    parts = [own(part) for part in parts]
    mask = ring.mask(parts[0], window, ends)
    found = results(around(partial(ring, dropout=0.0, mask=mask)), [*parts, sinks], kind)
    found[4:] = [group.sum(part) for part in found[4:]]  # of sinks, each rank has the part of its tokens
    expected[:4] = [own(part) for part in expected[:4]]
    pairs = zip(found, expected, strict=True)
    return max(((ours - exact).abs().max() / exact.abs().max().clamp(min=1)).item() for ours, exact in pairs)


def errors(topology: Topology, cases: list[tuple]) -> list[tuple]:
    """Cases that are not those of whole samples, or for which `sent` does not tell what is sent."""
    group, wrong, sent = TensorGroup(range(topology.world_size), topology.rank), [], [0]
    transfer = travel.dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *others: Any, **options: Any) -> Any:
        sent[0] += given.numel()
        return transfer(received, given, *others, **options)

    travel.dist.all_to_all_single = counted
    for backend in (None, "math"):
        ring = Ring(DotProduct(backend), group)
        for case in cases:
            (heads, groups), window, *_ = case
            sent[0] = 0
            found = error(ring, group, case)
            tokens = 2 * CHUNK * group.size
            told = sum(ring.sent(heads, groups, WIDTH, tokens, window)[:2]) * BATCH * tokens // group.size
            if not found < 1e-12 or (sent[0] != told):
                wrong.append((backend, case, found, sent[0], told))
    travel.dist.all_to_all_single = transfer
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for backend in (None, "math"):
            found = error(Ring(DotProduct(backend), group), group, (HEADS[0], None, False, "sinks"), dtype)
            if not found < 8 * torch.finfo(dtype).eps:
                wrong.append((backend, dtype, found))
    return wrong


@pytest.mark.parametrize(("ranks", "every"), [(2, 5), (4, 5), nightly(2, 1), nightly(4, 1), nightly(8, 1)])
def test_a_ring_attends_as_one_process_does(ranks: int, every: int) -> None:
    """Outputs and all gradients, in float64 and in the rounding of other formats."""
    assert on_ranks(ranks, errors, CASES[::every]) == [[]] * ranks


def plain_flex(graphs: list[Any]) -> Flex:
    """By torch's oracle for it; `graphs` get those that are compiled.

    CPUs have its gradients, but they are refused before anything else.
    """
    flex_attention._validate_device = lambda *tensors: None
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    flex = Flex()
    flex._outside = torch.compile(flex_attention.flex_attention, backend=backend, fullgraph=True)
    return flex


def flex_errors(topology: Topology, cases: list[tuple]) -> list[tuple]:
    """As `errors`, of FlexAttention, which has a graph for each pass, whatever the blocks."""
    group, wrong = TensorGroup(range(topology.world_size), topology.rank), []
    for case in cases:
        graphs: list[Any] = []
        found = error(Ring(plain_flex(graphs), group), group, case)
        if not found < 1e-5 or len(graphs) != 2:
            wrong.append((case, found, len(graphs)))
    return wrong


def compiled_and_recomputed(topology: Topology, flex_cases: list[tuple]) -> list[tuple]:
    """Cases of which graphs, or a recomputation, do not make the same bits, and those of `flex_errors`."""
    group, wrong = TensorGroup(range(topology.world_size), topology.rank), flex_errors(topology, flex_cases)
    for case in (
        ((3, 3), None, "sinks", DotProduct()),
        ((6, 2), 15, "cap slopes", DotProduct()),
        ((6, 2), 15, "sinks", plain_flex([])),
    ):
        (heads, groups), window, kind, kernel = case
        *parts, sinks = drawn(group.size, heads, groups, torch.float32)
        inputs = [*(own_part(part, group.size, group.rank) for part in parts), sinks]
        ring = Ring(kernel, group)
        mask = ring.mask(inputs[0], window, None)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, scores: Scores, ring: Any = ring, mask: Any = mask
        ) -> Tensor:
            return ring(2 * q, k, v, 0.0, mask, scores) * 3

        graph = torch.compile(attend, backend="aot_eager", fullgraph=not ring.splits_graphs)
        expected = results(attend, inputs, kind)
        for other in (graph, partial(checkpoint, attend, use_reentrant=False)):
            if not all(map(torch.equal, results(other, inputs, kind), expected)):
                wrong.append((case, other))
    return wrong


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flex_cases", [[((6, 2), CHUNK + 2, True, "slopes sinks")], CASES[::5]], ids=["one", "all"]
)
def test_graphs_make_the_same_bits_and_flex_attention_has_positions(flex_cases: list[tuple]) -> None:
    """So does a recomputation. FlexAttention sees blocks where their tokens are in the sample."""
    assert on_ranks(2, compiled_and_recomputed, flex_cases) == [[]] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_get_chunks_in_which_a_query_sees_a_key(ranks: int) -> None:
    """No other ones, and in the rounds of all ranks they are those that were sent."""
    size = 5
    tokens = 2 * ranks * size
    places_of = [[list(chunk) for chunk in places(tokens, ranks, rank)] for rank in range(ranks)]
    for window in (None, *range(1, tokens + 1)):
        made = [rounds(ranks, rank, tokens, window) for rank in range(ranks)]
        distances = [each.distance for each in made[0]]
        for rank, its in enumerate(made):
            assert [each.distance for each in its] == distances
            for each in its:
                source = (rank - each.distance) % ranks
                assert set(each.pairs) == {
                    (query, key)
                    for query in (0, 1)
                    for key in (0, 1)
                    if any(
                        0 <= here - there < (window or tokens)
                        for here in places_of[rank][query]
                        for there in places_of[source][key]
                    )
                }
                assert {key for _, key in each.pairs} == set(each.received)
                there = next(other for other in made[source] if other.distance == each.distance)
                assert there.sent == each.received
        for distance in set(range(ranks)) - set(distances):
            assert all(
                own.start - other.stop + 1 >= (window or tokens) or own.start < other.start
                for rank in range(ranks)
                for own in places(tokens, ranks, rank)
                for other in places(tokens, ranks, (rank - distance) % ranks)
            )


def test_kernels_without_sums_of_exponentials_are_refused() -> None:
    with pytest.raises(ValueError, match="efficient: has no blocks for --cp-comm-type p2p"):
        Ring(DotProduct("efficient"), None)
