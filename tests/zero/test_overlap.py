"""Products of tensor ranks beside exchanges of tokens: what starts before what, what is learned."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.distributed import peer_rows
from megatron_zpp.distributed.peer_rows import CollectiveRows
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.parallel import overlap
from megatron_zpp.model.parallel.exchanges import Gather, GatheredLinear, LinearScattered, ScatterSum
from megatron_zpp.plan.job import UnconnectedGroup
from tests.zero.ranks import on_ranks
from tests.zero.test_tensor_parallel import VOCAB, Case, build

INPUTS, OUTPUTS = 5, 8


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


def differences(topology: Topology, overlapped: bool) -> list[float]:
    """The largest differences from what one process computes of the parts of all ranks."""
    ranks, rank = topology.world_size, topology.rank
    group, generator = TensorGroup(range(ranks), rank), torch.Generator().manual_seed(5)
    tokens, compared = 12 * ranks, Comparison()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def own(whole: Tensor) -> Tensor:
        """Those rows that this rank has."""
        return whole.chunk(ranks)[rank]

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    hidden, weights, bias = drawn(tokens, INPUTS), drawn(ranks, OUTPUTS, INPUTS), drawn(OUTPUTS)
    back = drawn(ranks, tokens, OUTPUTS).detach()  # the gradient of each rank's outputs
    whole = torch.stack([F.linear(hidden, weight, bias) for weight in weights])
    of_hidden, of_weights = torch.autograd.grad(whole, (hidden, weights), back)
    mine, weight = leaf(own(hidden)), leaf(weights[rank])
    out = GatheredLinear.apply(mine, weight, bias, overlapped, group)
    expected = (mine, own(of_hidden)), (weight, of_weights[rank]), (bias, back[rank].sum(0))
    compared.add(out, whole[rank], back[rank], *expected)
    out = Gather.apply(mine, group)
    compared.add(out, hidden, back[rank, :, :INPUTS], (mine, own(back[:, :, :INPUTS].sum(0))))

    inner, weights, back = drawn(ranks, tokens, INPUTS), drawn(ranks, OUTPUTS, INPUTS), back[0]
    whole = sum(F.linear(part, weight) for part, weight in zip(inner, weights, strict=True))
    of_inner, of_weights = torch.autograd.grad(whole, (inner, weights), back)
    mine, weight = leaf(inner[rank]), leaf(weights[rank])
    out = LinearScattered.apply(mine, weight, overlapped, group)
    compared.add(out, own(whole), own(back), (mine, of_inner[rank]), (weight, of_weights[rank]))
    out = ScatterSum.apply(mine, group)
    compared.add(out, own(inner.sum(0)), own(back[:, :INPUTS]), (mine, back[:, :INPUTS]))
    return compared.largest


@pytest.mark.parametrize("overlapped", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_and_products_are_those_of_whole_tensors(ranks: int, overlapped: bool) -> None:
    for found in on_ranks(ranks, differences, overlapped):
        assert len(found) == 11
        assert max(found) < 1e-12


class Recorder(TorchDispatchMode):
    """The order of products, of what ranks send, and of waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._names = {"gather": "gather", "rows_of": "wait for a rank", "gathered": "wait for all"}
        self._names |= {"send": "send", "sum": "wait for parts"}

    def take(self) -> list[str]:
        """The calls since the last `take`."""
        calls, self.calls = self.calls, []
        return calls

    def begin(self, group: TensorGroup, rows: int, width: int, like: Tensor) -> CollectiveRows:
        """As peer_rows.begin."""
        found = CollectiveRows(group, rows, width, like)
        for method, name in self._names.items():
            setattr(found, method, self._recorded(name, getattr(found, method)))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megatron_zpp_model":
            with self:  # the mode is off inside an operator
                return getattr(overlap, func._opname)._init_fn(*args)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.matmul):
            self.calls.append("product")
        return func(*args, **kwargs or {})

    def _recorded(self, name: str, method: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return method(*args, **kwargs)

        return recorded


def order(topology: Topology) -> list[list[str]]:
    """Of the forward and the backward of both kinds of maps."""
    group = TensorGroup(range(topology.world_size), topology.rank)
    found, recorder = [], Recorder()
    rows, inner = torch.ones(4, INPUTS), torch.ones(4 * group.size, INPUTS)
    weight = torch.ones(OUTPUTS, INPUTS, requires_grad=True)
    with recorder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_rows, "begin", recorder.begin)
        for apply in (
            lambda: GatheredLinear.apply(rows.requires_grad_(), weight, None, True, group),
            lambda: LinearScattered.apply(inner.requires_grad_(), weight, True, group),
        ):
            out = apply()
            found.append(recorder.take())
            out.backward(torch.ones_like(out))
            found.append(recorder.take())
    return found


def test_ranks_send_before_the_products_beside_which_it_travels() -> None:
    """Own rows are multiplied before others are waited for, and others' products are made first and sent."""
    each, parts = ["wait for a rank", "product"] * 2, ["product", "send"] * 2
    for found in on_ranks(3, order):
        assert found == [
            ["gather", "product", *each],
            ["gather", *parts, "product", "wait for all", "product", "wait for parts"],
            [*parts, "product", "wait for parts"],
            ["gather", "product", *each, "wait for all", "product"],
        ]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_in_each_round_a_rank_hears_from_one_and_sends_to_one(size: int) -> None:
    """Rows come in the order in which they are taken."""
    groups = [UnconnectedGroup(size, rank) for rank in range(size)]
    sent, taken = (list(map(order_of, groups)) for order_of in (peer_rows.others_first, peer_rows.own_first))
    for rank in range(size):
        assert sorted(sent[rank]) == sorted(taken[rank]) == list(range(size))
        assert sent[rank][-1] == taken[rank][0] == rank
        for number in range(size - 1):
            assert sent[taken[rank][1 + number]][number] == rank


def logits(topology: Topology, case: Case) -> list[float]:
    """Of the token after the sixth. Tensor ranks have more behind it, which is no part of the text."""
    engine = build(case, topology)
    tokens, more = torch.arange(12)[None] * 7 % VOCAB, {"after": 5}
    if case.tensor == 1:
        tokens, more = tokens[:, :6], {}
    found = engine.next_token_logits(tokens, **more).tolist()
    engine.close()
    return found


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_text_is_continued_as_by_one_process(model: str) -> None:
    expected = logits(Topology(), Case(model))
    for found in on_ranks(2, logits, Case(model, 2, 3, overlapped=True)):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
