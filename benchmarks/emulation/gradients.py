"""The sum of gradients over nodes × ranks, by the format in which they travel.

Hop 1 sums the ranks of a node in their order into fp32, and the micro-batches of a step in theirs. Hop 2
sends each node's sum once per step, and the owners sum what the nodes sent in the order of the nodes.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel, UnitRun
from benchmarks.emulation.rungs import Rung, Travel
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs


class NodeSum:
    """Hop 1 of one node: what its ranks made, summed into an fp32 buffer (n,)."""

    def __init__(self, operations: Operations, coded: Sequence[slice], format: QuantFormat | None) -> None:
        """Gradients travel in `format` in the ranges `coded`, and as they are elsewhere; None: everywhere."""
        self._operations = operations
        self._coded = [] if format is None else [(here, format) for here in coded]
        self._messages: list[list[Tensor]] = [[] for _ in self._coded]
        self._ranks: Tensor | None = None
        self.total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Takes the gradient (n,) of the next rank; the caller may overwrite it."""
        for (here, format), messages in zip(self._coded, self._messages, strict=True):
            messages.append(message_of(self._operations, format, gradient[here]))
        if self._ranks is None:
            self._ranks = gradient.to(torch.float32, copy=True)
        else:
            self._ranks += gradient

    def end_micro_batch(self) -> None:
        """All ranks of the node were added."""
        ranks, self._ranks = self._ranks, None
        assert ranks is not None, "a micro-batch has ranks"
        for (here, format), messages in zip(self._coded, self._messages, strict=True):
            summed = torch.empty_like(ranks[here])
            self._operations.sum_into(torch.cat(messages), summed, format)
            ranks[here] = summed
            messages.clear()
        self.total = ranks if self.total is None else self.total + ranks

    def take(self) -> Tensor:
        """The sum of the step, after which the next one begins."""
        total, self.total = self.total, None
        assert total is not None, "a step has micro-batches"
        return total


# Hop 2 of a range: each node's sum (n,) fp32, and the iteration -> the sum (n,) fp32 of what arrives of them.
CrossNodeSum = Callable[[Sequence[Tensor], int], Tensor]


def plain_sum(nodes: Sequence[Tensor], iteration: int, *, rounded: bool = False) -> Tensor:
    """Sums as they are, or rounded to 16 bits first, in the order of the nodes."""
    return reduce(torch.add, [node.bfloat16().float() if rounded else node for node in nodes])


class Codes:
    """The engine's block codes (qgZ), with error feedback or without."""

    def __init__(self, operations: Operations, format: QuantFormat, *, feedback: float) -> None:
        """`feedback`: the share of what codes lost that the next step sends."""
        self._operations, self._format, self._feedback = operations, format, feedback
        self._lost: list[Tensor] | None = [] if feedback else None

    def __call__(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        values = nodes
        if self._lost is not None:
            owed = _owed(nodes, self._lost, self._feedback)
            values = [node + each for node, each in zip(nodes, owed, strict=True)]
        messages = torch.cat([message_of(self._operations, self._format, value) for value in values])
        for value, message, lost in zip(values, messages, self._lost or (), strict=self._lost is not None):
            arrived = torch.empty(1, len(value), device=value.device)
            self._operations.dequantize(message[None], arrived, self._format)
            lost.copy_(value - arrived[0])
        total = torch.empty_like(nodes[0])
        self._operations.sum_into(messages, total, self._format)
        return total


class Rotated:
    """Rotated Lloyd-Max codes as the engine has them, with error feedback or without.

    Codes are summed over the nodes, and rotated back once.
    """

    def __init__(
        self,
        operations: Operations,
        format: LloydMaxFormat,
        runs: Sequence[UnitRun],
        gaps: Tensor,
        seed: int,
        *,
        feedback: float = 0.0,
    ) -> None:
        """`runs` and `gaps` are those of the range; `feedback` as in Codes."""
        self._operations, self._format, self._runs, self._seed = operations, format, runs, seed
        self._gaps, self._feedback = gaps if gaps.any() else None, feedback
        self._lost: list[Tensor] | None = [] if feedback else None
        self._divisor = torch.ones((), device=gaps.device)

    def __call__(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        total = torch.empty_like(nodes[0])
        lost = None if self._lost is None else _owed(nodes, self._lost, self._feedback)
        for run in self._runs:
            part, format = total[run.here], self._format
            size = format.message_bytes(len(part))
            messages = torch.empty(len(nodes), size, dtype=torch.uint8, device=part.device)
            signs = Signs(self._seed, run.unit, iteration, run.first)
            for index, (node, message) in enumerate(zip(nodes, messages, strict=True)):
                more = {} if lost is None else {"lost": lost[index][None, run.here], "divisor": self._divisor}
                self._operations.quantize_rotated(node[run.here], message[None], format, signs, **more)
            self._operations.sum_rotated(messages, part, format, signs)
        for each in () if self._gaps is None else (total, *(lost or ())):
            each.masked_fill_(self._gaps, 0.0)
        return total


def regathered(sums: CrossNodeSum, again: Rotated, nodes: Sequence[Tensor], iteration: int) -> Tensor:
    """Sums whose owners send them on in codes: every node gets what the codes say, owners too."""
    return again([sums(nodes, iteration)], iteration)


def cross_node_sum(
    travel: Travel,
    rung: Rung,
    operations: Operations,
    flat: FlatModel,
    here: slice,
    seed: int,
    momentum: float,
) -> CrossNodeSum:
    """Hop 2 of the range `here`."""
    format, sums, feedback = travel
    share = momentum if feedback == "momentum" else feedback
    if format in ("plain", "bf16"):
        return partial(plain_sum, rounded=format == "bf16")
    rotated = partial(
        Rotated, operations, runs=flat.runs_of(here), gaps=flat.gaps[here], seed=seed, feedback=share
    )
    reduced: CrossNodeSum
    if format == "int8" or format == "int4":
        reduced = Codes(operations, QuantFormat(format, rung.gradient_block), feedback=share)
    else:
        reduced = rotated(LloydMaxFormat(int(format[-1]), rung.gradient_block))
    if sums == "plain":
        return reduced
    return partial(regathered, reduced, rotated(LloydMaxFormat(4, rung.gradient_block), seed=seed + 1))


def _owed(nodes: Sequence[Tensor], lost: list[Tensor], share: float) -> list[Tensor]:
    """The share that is sent of what codes have lost of each node's sum; the first time that is nothing."""
    if not lost:
        lost += [torch.zeros_like(node, dtype=torch.bfloat16) for node in nodes]
    for each in lost if share != 1.0 else ():
        each *= share
    return lost


def message_of(operations: Operations, format: QuantFormat, values: Tensor) -> Tensor:
    """The codes (1, bytes) of values (n,)."""
    message = torch.empty(1, format.message_bytes(len(values)), dtype=torch.uint8, device=values.device)
    operations.quantize(values[None], message, format)
    return message
