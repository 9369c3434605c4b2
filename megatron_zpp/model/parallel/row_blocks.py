"""Tables in blocks of rows that tensor ranks share: each rank has an equal part of the rows of every block.

Shapes: T tensor ranks, B batch, S tokens per sample, D hidden size, R = B · S / T tokens of this rank, V
padded vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.mesh import Axis
from megatron_zpp.model.gpt import GPT, embedding
from megatron_zpp.model.parallel.exchanges import Gather, ScatterSum
from megatron_zpp.model.parallel.layers import of_all_ranks
from megatron_zpp.model.row_blocks import (
    LookupBlock,
    RowBlockHead,
    RowBlockTable,
)
from megatron_zpp.placement import Split


def share_row_blocks(model: GPT, group: TensorGroup, tokens: int) -> None:
    """Leave this rank of `group` its part of the tables of a `model`, which are in blocks; see `Sharing`."""
    table, head = model.embedding.tokens, model.head
    assert isinstance(table, RowBlockTable)
    assert isinstance(head, RowBlockHead)
    parts: dict[nn.Parameter, Any] = {}
    for block in (*table.blocks, *head.output.blocks):
        held, width = len(block.block_rows) // group.size, block.weight.shape[1]
        if block.weight not in parts:
            parts[block.weight] = embedding(held, width).weight
        block.weight = parts[block.weight]
        block.first += group.rank * held
        block.tensor_splits = {"weight": Split(0, (block.table_entries,), Axis(1, group.size))}
    model.embedding.tokens = SharedRowBlockTable(list(table.blocks), group)
    model.head = SharedRowBlockHead(head, group, tokens)


class SharedRowBlockTable(RowBlockTable):
    """The embedding of tokens, in blocks."""

    def __init__(self, blocks: list[LookupBlock], group: TensorGroup) -> None:
        super().__init__(blocks)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S) -> the rows of this rank's tokens, (R, D)."""
        return ScatterSum.apply(super().forward(ids.flatten()), self.group)


class SharedRowBlockHead(RowBlockHead):
    """The head of a model whose output weights are in blocks, of which each rank has a part."""

    def __init__(self, whole: RowBlockHead, group: TensorGroup, tokens: int) -> None:
        super().__init__(whole.norm, whole.output, whole.objective, whole.multiplier)
        self.group, self._tokens = group, tokens

    def normalize(self, x: Tensor) -> Tensor:
        """(R, D) -> the norm of all tokens, (B · S, D)."""
        return Gather.apply(super().normalize(x), self.group)

    def logits(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """(B · S, D) -> (B, S, V). For inference alone."""
        parts = [of_all_ranks(self.group, block(x)) for block in self.output.blocks]
        return torch.cat(parts, -1).unflatten(0, (-1, self._tokens))

    def losses(self, x: Tensor, weight: Tensor | None, targets: Tensor) -> Tensor:
        return self.output.loss(x, targets, self.objective, self.block_passes, self.group.gather)
