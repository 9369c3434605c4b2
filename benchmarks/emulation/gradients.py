"""The sum of gradients over nodes × ranks, by the format in which they travel.

Hop 1 sums the ranks of a node in their order into fp32, and the micro-batches of a step in theirs. Hop 2
sends each node's sum once per step, and the owners sum what the nodes sent in the order of the nodes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.emulation.flat_model import FlatModel, UnitRun
from benchmarks.emulation.rungs import Rung, Travel
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.lloyd_max import decoded
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.reference_rotation import encode_rotated, random_signs, rotate, rotate_back
from megatron_zpp.ops.signs import Signs

Counters = tuple[Tensor, Tensor, Tensor]


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
            messages.append(_message(self._operations, format, gradient[here]))
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


class CrossNodeSum(Protocol):
    """Hop 2 of a range."""

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """The sum (n,) fp32 of what arrives of each node's sum (n,) fp32."""


class PlainSum:
    """Sums as they are, or rounded to 16 bits first."""

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """See CrossNodeSum."""
        return _ordered([node.bfloat16().float() if self._rounded else node for node in nodes])


class Codes:
    """The engine's block codes (qgZ), with error feedback or without."""

    def __init__(self, operations: Operations, format: QuantFormat, *, feedback: float) -> None:
        """`feedback`: the share of what codes lost that the next step sends."""
        self._operations, self._format, self._feedback = operations, format, feedback
        self._errors: list[Tensor] | None = [] if feedback else None

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """See CrossNodeSum."""
        values = nodes if self._errors is None else _with_errors(nodes, self._errors, self._feedback)
        messages = torch.cat([_message(self._operations, self._format, value) for value in values])
        if self._errors is not None:
            for value, message, error in zip(values, messages, self._errors, strict=True):
                arrived = torch.empty(1, len(value), device=value.device)
                self._operations.dequantize(message[None], arrived, self._format)
                error.copy_(value - arrived[0])
        total = torch.empty_like(nodes[0])
        self._operations.sum_into(messages, total, self._format)
        return total


class Rotated:
    """Rotated Lloyd-Max codes as the engine has them: summed over the nodes, and rotated back once."""

    def __init__(
        self,
        operations: Operations,
        format: LloydMaxFormat,
        runs: Sequence[UnitRun],
        gaps: Tensor,
        seed: int,
    ) -> None:
        """`runs` and `gaps` are those of the range."""
        self._operations, self._format, self._runs, self._seed = operations, format, runs, seed
        self._gaps = gaps if gaps.any() else None

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """See CrossNodeSum."""
        total = torch.empty_like(nodes[0])
        for run in self._runs:
            part = total[run.here]
            size = self._format.message_bytes(len(part))
            messages = torch.empty(len(nodes), size, dtype=torch.uint8, device=part.device)
            signs = Signs(self._seed, run.unit, iteration, run.first)
            for node, message in zip(nodes, messages, strict=True):
                self._operations.quantize_rotated(node[run.here], message[None], self._format, signs)
            self._operations.sum_rotated(messages, part, self._format, signs)
        return total if self._gaps is None else total.masked_fill_(self._gaps, 0.0)


class VariedRotated:
    """The same in plain torch, with what the engine lacks: error feedback."""

    def __init__(
        self, format: LloydMaxFormat, counters: Counters, gaps: Tensor, seed: int, feedback: float
    ) -> None:
        """`counters` and `gaps` are those of the range; `feedback` as in Codes."""
        self._format, self._counters, self._seed, self._feedback = format, counters, seed, feedback
        self._gaps = gaps if gaps.any() else None
        self._errors: list[Tensor] | None = [] if feedback else None

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """See CrossNodeSum."""
        values = nodes if self._errors is None else _with_errors(nodes, self._errors, self._feedback)
        signs = random_signs(self._counters, self._seed, iteration).view(-1, self._format.block)
        arrived = []
        for node, value in enumerate(values):
            x = value.view(-1, self._format.block)
            bits = self._format.bits
            arrived.append(decoded(*encode_rotated(rotate(x, signs), bits), bits))
            if self._errors is not None:
                lost = (x - rotate_back(arrived[node], signs)).view(-1)
                self._errors[node].copy_(lost if self._gaps is None else lost.masked_fill(self._gaps, 0.0))
        total = rotate_back(_ordered(arrived), signs).reshape(-1)
        return total if self._gaps is None else total.masked_fill(self._gaps, 0.0)


class Regathered:
    """Sums whose owners send them on in codes: every node gets what the codes say, owners too."""

    def __init__(self, sums: CrossNodeSum, again: VariedRotated) -> None:
        self._sums, self._again = sums, again

    def sum(self, nodes: Sequence[Tensor], iteration: int) -> Tensor:
        """See CrossNodeSum."""
        return self._again.sum([self._sums.sum(nodes, iteration)], iteration)


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
        return PlainSum(rounded=format == "bf16")
    varied = partial(
        VariedRotated, counters=flat.counters_of(here), gaps=flat.gaps[here], seed=seed, feedback=share
    )
    reduced: CrossNodeSum
    if format == "int8" or format == "int4":
        reduced = Codes(operations, QuantFormat(format, rung.gradient_block), feedback=share)
    else:
        codes = LloydMaxFormat(int(format[-1]), rung.gradient_block)
        if travel.varies:
            reduced = varied(codes)
        else:
            reduced = Rotated(operations, codes, flat.runs_of(here), flat.gaps[here], seed)
    return reduced if sums == "plain" else Regathered(reduced, varied(LloydMaxFormat(4, rung.gradient_block)))


def _with_errors(nodes: Sequence[Tensor], errors: list[Tensor], share: float) -> list[Tensor]:
    """Each node's sum and the share of what it owes; the first time it owes nothing."""
    if not errors:
        errors += [torch.zeros_like(node, dtype=torch.bfloat16) for node in nodes]
    return [node + share * error for node, error in zip(nodes, errors, strict=True)]


def _message(operations: Operations, format: QuantFormat, values: Tensor) -> Tensor:
    message = torch.empty(1, format.message_bytes(len(values)), dtype=torch.uint8, device=values.device)
    operations.quantize(values[None], message, format)
    return message


def _ordered(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
