"""Tables of the vocabulary in blocks of rows, each a module with a parameter of its own.

Shapes: B batch, T tokens, N = B · T, C tokens of a chunk, D hidden size, V padded vocabulary, R rows of a
block.

The lookup puts the rows that a block has in their places, block after block. So its result has the bits of a
whole table's. The loss goes through the blocks twice. In the forward the logits of a block (N, R) become
three numbers per token, and those of all blocks the softmax's denominator. In the backward each block makes
its logits again, then their gradient, and both products with it. So only one block's logits are there at a
time, at the price of a fourth product.

Where the tables are tied, a block of the lookup and a block of the loss have the same parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.model.gpt import GPT, Head, embedding
from megatron_zpp.model.loss import (
    CHUNK_BYTES,
    IGNORED,
    LossKernels,
    Objective,
    add_product,
    chunk_rows,
    of_cross_entropy,
    slices,
    wide,
    z_terms,
)
from megatron_zpp.model.partial_softmax import local_gradient, local_statistics
from megatron_zpp.placement import Split

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def in_row_blocks(model: GPT, rows: int) -> None:
    """Replace the tables of a `model` by blocks of `rows` rows."""
    entries, width = model.config.embedding_rows(model.entries), model.config.hidden_size
    lookup = blocks_of(LookupBlock, entries, width, rows)
    if model.tied:
        output = [OutputBlock(each.weight, each.block_rows, each.table_entries) for each in lookup]
    else:
        output = blocks_of(OutputBlock, entries, width, rows)
    model.embedding.tokens = RowBlockTable(lookup)
    head = model.head
    model.head = RowBlockHead(head.norm, OutputBlocks(output), head.objective, head.multiplier)
    model.table_rows, model.ends = rows, partial(_units, tied=model.tied)


def _units(name: str, module: nn.Module, *, tied: bool) -> list[tuple[str, nn.Module]]:
    """The units of the embedding or the head: blocks, and modules without any."""
    units: list[tuple[str, nn.Module]] = []
    for part, child in module.named_children():
        if isinstance(child, RowBlockTable | OutputBlocks):
            table = "embedding.tokens" if tied else f"{name}.{part}"
            units += [(table, block) for block in child.blocks]
        elif next(child.parameters(), None) is not None:
            units.append((f"{name}.{part}", child))
    return units


class Block(nn.Module):
    """`block_rows` of a table of `table_entries` rows; those that this rank has begin at row `first`."""

    def __init__(self, weight: nn.Parameter, block_rows: range, table_entries: int) -> None:
        super().__init__()
        self.weight, self.block_rows, self.table_entries = weight, block_rows, table_entries
        self.first = block_rows.start
        self.tensor_splits: dict[str, Split] = {}


class LookupBlock(Block):
    """Some rows of the table of tokens."""

    read_by_backward = False

    def forward(self, found: Tensor, ids: Tensor) -> Tensor:
        """`found` (…, D), with the rows of those `ids` (…) that the block has in their places."""
        return _PlaceRows.apply(found, self.weight, ids - self.first)


class OutputBlock(Block):
    """Some rows of the output weights."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        objective: Objective | None = None,
        passes: "BlockPasses | None" = None,
    ) -> Tensor:
        """(…, D) -> the logits of these rows, (…, R); with targets (N) of x (N, D), see `_Statistics`."""
        if targets is None or objective is None:
            return F.linear(x, self.weight)
        entries = min(max(objective.vocab_size - self.first, 0), len(self.weight))
        own = objective._replace(vocab_size=entries)
        return _Statistics.apply(x, self.weight, targets - self.first, own, passes or PLAIN)


class _Blocks(nn.Module):
    """A table in blocks."""

    weight = None  # of all rows: there is none

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.width = blocks[0].weight.shape[1]
        self.blocks: Any = nn.ModuleList(blocks)  # in the order of their rows


class RowBlockTable(_Blocks):
    """The embedding of tokens, in blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        """(…) -> (…, D)."""
        found = next(self.parameters()).new_zeros((*ids.shape, self.width))
        for block in self.blocks:
            found = block(found, ids)
        return found


class OutputBlocks(_Blocks):
    """The output weights, in blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> logits (…, V)."""
        return torch.cat([block(x) for block in self.blocks], -1)

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        objective: Objective,
        passes: "BlockPasses",
        gather: Callable[[Tensor], Tensor] = lambda statistics: statistics,
    ) -> Tensor:
        """As loss.linear_cross_entropy, of x (N, D) and targets (N).

        `gather` joins the statistics (blocks, 3, N) of all ranks that have rows of the blocks.
        """
        exact = x.to(wide(x.dtype))  # so that the terms of its gradient, one per block, are summed in fp32
        statistics = [block(exact, targets, objective, passes) for block in self.blocks]
        return _MeanLoss.apply(targets, objective, gather, *statistics)


class RowBlockHead(Head):
    """The head of a model whose output weights are in blocks."""

    output: OutputBlocks

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.block_passes = PLAIN

    def logits(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """See Head; the head has the blocks of the token embedding, so there is no `weight`."""
        return self.output(x)

    def losses(self, x: Tensor, weight: Tensor | None, targets: Tensor) -> Tensor:
        return self.output.loss(x, targets, self.objective, self.block_passes)

    def compile_loss(self, compiler: Compiler, fused: LossKernels | None) -> None:
        """See Head; `fused` is for whole vocabularies."""
        self.block_passes = BlockPasses(compiler(local_statistics), compiler(local_gradient))


@dataclass(frozen=True)
class BlockPasses:
    """The parts of a block's loss that are not products, as functions of their arguments alone.

    A chunk is as many tokens as have `chunk_bytes` of a block's logits, if these were fp32.
    """

    statistics: Callable[[Tensor, Tensor, Objective], Tensor] = local_statistics
    gradient: Callable[[Tensor, Tensor, Tensor, Objective], Tensor] = local_gradient
    chunk_bytes: int = CHUNK_BYTES


PLAIN = BlockPasses()


class _PlaceRows(torch.autograd.Function):
    """`found` (…, D) with rows of `weight` (R, D) where `local` (…) names one, from 0 to R - 1.

    The gradient of `found` keeps what belongs to these rows: blocks before this one have none of them.
    """

    @staticmethod
    def forward(ctx: Any, found: Tensor, weight: Tensor, local: Tensor) -> Tensor:
        inside = (local >= 0) & (local < len(weight))
        ctx.rows = len(weight)
        ctx.save_for_backward(local.masked_fill(~inside, ctx.rows))
        return torch.where(inside[..., None], F.embedding(local.masked_fill(~inside, 0), weight), found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:  # row R is for padding, which has no gradient
            of_weight = torch.ops.aten.embedding_dense_backward(
                gradient, local, ctx.rows + 1, ctx.rows, False
            )[: ctx.rows]
        return gradient if ctx.needs_input_grad[0] else None, of_weight, None


class _Statistics(torch.autograd.Function):
    """The statistics (3, N) of logits, as `local_statistics` makes them; x is fp32, or wider.

    The backward gets the message of _MeanLoss in place of a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, place: Tensor, objective: Objective, passes: BlockPasses
    ) -> Tensor:
        ctx.objective, ctx.passes = objective, passes
        ctx.save_for_backward(x, weight, place)
        found = x.new_empty(3, len(x))
        for tokens in slices(len(x), chunk_rows(len(x), len(weight), passes.chunk_bytes)):
            logits = x[tokens].to(weight.dtype) @ weight.T  # (C, R)
            found[:, tokens] = passes.statistics(logits, place[tokens], objective)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, message: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, place = ctx.saved_tensors
        chunks = slices(len(x), chunk_rows(len(x), len(weight), ctx.passes.chunk_bytes))
        of_x, several = torch.empty_like(x), len(chunks) > 1
        of_weight = torch.empty_like(weight, dtype=x.dtype if several else weight.dtype)
        for index, tokens in enumerate(chunks):
            part = x[tokens].to(weight.dtype)
            logits = part @ weight.T  # (C, R)
            gradient = ctx.passes.gradient(logits, place[tokens], message[:, tokens], ctx.objective)
            add_product(gradient, weight, of_x[tokens], begins=True)
            if several:
                add_product(gradient.T, part, of_weight, begins=index == 0)
            else:
                torch.mm(gradient.T, part, out=of_weight)
            del logits, gradient  # before there are those of the next chunk
        return of_x, of_weight.to(weight.dtype), None, None, None


class _MeanLoss(torch.autograd.Function):
    """As loss.linear_cross_entropy, of targets (N) and the statistics (3, N) of all blocks.

    In place of their gradients, the backward hands the blocks a message (3, N), from which `local_gradient`
    makes those of their logits. Small gradients stay accurate, which the difference of two numbers near 1
    would lose.
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        objective: Objective,
        gather: Callable[[Tensor], Tensor],
        *statistics: Tensor,
    ) -> Tensor:
        largest, totals, wanted = gather(torch.stack(statistics)).unbind(1)  # each (blocks, N)
        most = largest.amax(0)
        log_sum = torch.log((totals * torch.exp(largest - most)).sum(0))
        # In this order, a target with the largest logit loses nothing to the size of the logits.
        likelihood, log_total = wanted.sum(0) - most - log_sum, most + log_sum
        counted = targets != IGNORED
        count = counted.sum().clamp(min=1)
        ctx.blocks = len(statistics)
        ctx.save_for_backward(counted, count, likelihood, log_total)
        loss = -torch.where(counted, likelihood, 0.0).sum() / count
        if objective.z_coeff == 0:
            return loss
        z_loss, _ = z_terms(log_total, objective.z_coeff)
        return torch.stack((loss, torch.where(counted, z_loss, 0.0).sum() / count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        counted, count, likelihood, log_total = ctx.saved_tensors
        factor = counted * (of_cross_entropy(of_losses) / count)
        message = torch.stack((factor, log_total, likelihood))
        return None, None, None, *[message] * ctx.blocks


def blocks_of(kind: Callable[..., Any], entries: int, width: int, rows: int) -> list[Any]:
    """The blocks of a table, modules of a `kind`."""
    ranges = [range(start, min(start + rows, entries)) for start in range(0, entries, rows)]
    return [kind(embedding(len(each), width).weight, each, entries) for each in ranges]
