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
from megatron_zpp.model.loss import soft_capped
from megatron_zpp.model.parallel.exchanges import Gather, ScatterSum
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
    for block in (*table.each(), *head.output.each()):
        held, width = len(block.block_rows) // group.size, block.weight.shape[1]
        if block.weight not in parts:
            parts[block.weight] = embedding(held, width).weight
        block.weight = parts[block.weight]
        block.first += group.rank * held
        block.tensor_splits = {"weight": Split(0, (block.table_entries,), Axis(1, group.size))}
    model.embedding.tokens = SharedRowBlockTable(list(table.each()), group)
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

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """(R, D) -> as RowBlockHead, for all tokens. Logits are for inference alone."""
        x = Gather.apply(self.normalize(x), self.group)  # (B · S, D)
        if targets is None:
            parts = [self.group.gather(block(x)[None]) for block in self.output.each()]  # (T, B · S, …)
            logits = torch.cat([part.movedim(0, 1).flatten(1) for part in parts], -1)
            return soft_capped(logits.unflatten(0, (-1, self._tokens)), self.objective.cap)
        passes = self.block_passes
        losses = self.output.loss(x, targets.flatten(), self.objective, passes, self.group.gather)
        return self.cross_entropy(losses)
