"""Tables in blocks of rows that tensor ranks share: each rank has an equal part of the rows of every block.

Shapes: T tensor ranks, B batch, S tokens per sample, D hidden size, R = B · S / T tokens of this rank, V
padded vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.model.parallel.exchanges import Gather, ScatterSum
from megatron_zpp.model.parallel.layers import TensorParallelComponents
from megatron_zpp.model.row_blocks import (
    LookupBlock,
    OutputBlock,
    OutputBlocks,
    RowBlockComponents,
    RowBlockHead,
    RowBlockTable,
    blocks_of,
)


@dataclass(frozen=True, kw_only=True)
class SharedRowBlockComponents(RowBlockComponents, TensorParallelComponents):
    """Components of a model that the ranks of `group` share, whose tables are in blocks of `rows` rows."""

    def vocabulary(self, entries: int, width: int) -> nn.Module:
        """See ModelComponents."""
        return SharedRowBlockTable(self._blocks(LookupBlock, entries, width), self)

    def output(self, width: int, entries: int) -> nn.Module:
        """See ModelComponents."""
        return OutputBlocks(self._blocks(OutputBlock, entries, width))

    def head_class(self, plain: type[nn.Module]) -> Any:
        """See ModelComponents."""
        return SharedRowBlockHead

    def _blocks(self, kind: Any, entries: int, width: int) -> list[Any]:
        group = self.group
        blocks = blocks_of(kind, entries, width, self.rows, ranks=group.size, rank=group.rank)
        for block in blocks:
            block.tensor_splits = {"weight": self._split(0, (entries,))}
        return blocks


class SharedRowBlockTable(RowBlockTable):
    """The embedding of tokens, in blocks."""

    def __init__(self, blocks: list[LookupBlock], parts: TensorParallelComponents) -> None:
        super().__init__(blocks)
        self.group = parts.group

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S) -> the rows of this rank's tokens, (R, D)."""
        return ScatterSum.apply(super().forward(ids.flatten()), self.group)


class SharedRowBlockHead(RowBlockHead):
    """The head of a model whose output weights are in blocks, of which each rank has a part."""

    def __init__(self, config: Any, parts: TensorParallelComponents, *sizes: int) -> None:
        super().__init__(config, parts, *sizes)
        self.group, self._tokens = parts.group, parts.tokens

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """(R, D) -> as RowBlockHead, for all tokens. Logits are for inference alone."""
        x = Gather.apply(self.norm(x), self.group)  # (B · S, D)
        if targets is None:
            parts = [self.group.gather(block(x)[None]) for block in self.output.each()]  # (T, B · S, …)
            logits = torch.cat([part.movedim(0, 1).flatten(1) for part in parts], -1)
            return logits.unflatten(0, (-1, self._tokens))
        passes = self.block_passes
        return self.output.loss(x, targets.flatten(), self.vocab_size, passes, self.group.gather)
