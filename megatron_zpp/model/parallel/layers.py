"""Layers that tensor ranks share, with sequence parallelism (Megatron-LM papers 1909.08053, 2205.05198).

Shapes: T tensor ranks, B batch, S tokens per sample, D hidden size, R = B · S / T rows of this rank, V padded
vocabulary.

Between the linear maps of a layer, where norms, dropout and residual sums are, a rank has the rows of its own
tokens: (R, D), part r of the B · S tokens laid end to end. A
column-parallel map gathers the rows of all ranks and computes some of the outputs for all tokens,
(B, S, outputs / T). A row-parallel map has some of the inputs, and its products are summed over ranks and
scattered to the rows. What is kept for the backward of a map into heads or into the MLP is (R, D) too: the
backward gathers it again, beside the product that does not need it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.mesh import Axis
from megatron_zpp.model.gpt import GPT, Head, embedding
from megatron_zpp.model.loss import LossKernels
from megatron_zpp.model.matmuls import Product
from megatron_zpp.model.parallel.exchanges import Gather, GatheredLinear, LinearScattered, ScatterSum
from megatron_zpp.model.parallel.loss import Compiler, vocabulary_parallel_loss
from megatron_zpp.model.recomputation import mlps_again
from megatron_zpp.placement import Split


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the ranks of `group` share the layers of a model, and the `tokens` of each sample that they have.

    `product` returns what one linear map computes: F.linear, or the same in 8 bits. `overlapped`: products
    run beside exchanges, in training and only with F.linear.
    """

    group: TensorGroup
    tokens: int
    product: Callable[[], Product] = lambda: F.linear
    overlapped: bool = False

    def split(self, dim: int, *runs: int) -> Split:
        """That of a parameter whose `dim` has runs that are split by themselves."""
        return Split(dim, runs, Axis(1, self.group.size))


def share_layers(model: GPT, sharing: Sharing) -> None:
    """Leave this rank its part of every layer: equal parts of heads, groups and inner width."""
    group, ranks = sharing.group, sharing.group.size
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        by_row = replace(sharing, tokens=1) if layer.mlp_chunks > 1 else sharing
        for part, into, its in ((attention, "qkv", sharing), (mlp, "input", by_row)):
            setattr(part, into, ColumnParallel(getattr(part, into), part.runs, its))
            part.output = RowParallel(part.output, sharing)
        if attention.across_heads:
            from megatron_zpp.model.parallel.norm import NormAcrossRanks

            for name in ("query_norm", "key_norm"):
                norm = getattr(attention, name)
                split = sharing.split(0, *norm.normalized_shape)
                setattr(attention, name, NormAcrossRanks(norm, split, group))
        if attention.sinks is not None:
            attention.sinks = nn.Parameter(attention.sinks.new_zeros(attention.heads // ranks))
            _split(attention, sinks=sharing.split(0, attention.heads))
        attention.heads, attention.groups = attention.heads // ranks, attention.groups // ranks
        attention.first_head = group.rank * attention.heads
    model.tensor_ranks = ranks
    # Positions (B or 1, S) of the tokens whose hidden states this rank has between linear maps, (R).
    model.embedding.own = lambda at, tokens: at.expand(tokens.shape).reshape(group.size, -1)[group.rank]


def share_tables(model: GPT, sharing: Sharing) -> None:
    """Leave this rank its entries of the tables of a `model`, which are whole."""
    entries, width = model.config.embedding_rows(model.entries), model.config.hidden_size
    held, split = entries // sharing.group.size, sharing.split(0, entries)
    model.embedding.tokens = _split(VocabularyParallelEmbedding(held, width, sharing.group), weight=split)
    output = None if model.tied else _split(nn.Linear(width, held, bias=False), weight=split)
    model.head = VocabularyParallelHead(model.head, output, sharing)


def _split(module: Any, **splits: Split) -> Any:
    """`module`, which says how its parameters are shared."""
    module.tensor_splits = splits
    return module


def splits_of(units: Sequence[tuple[str, nn.Module]]) -> dict[str, Split]:
    """How tensor ranks share the parameters of units, by name; they all have the others whole."""
    return {
        f"{name}.{parameter}": split
        for unit, part in units
        for name, module in part.named_modules(prefix=unit)
        for parameter, split in getattr(module, "tensor_splits", {}).items()
    }


def exchanges_of_rows(model: GPT) -> list[tuple[int, int]]:
    """Elements that forward and backward of each unit send per row of a rank, in the order of units.

    A layer has two pairs of a gather of hidden states and a scatter. The backward of a pair scatters and
    gathers their gradients, and gathers the input of the first map again, unless products are of 8-bit
    floats, which keep it whole. MLPs that the backward computes again in chunks gather and scatter once more.
    """
    first = model.layers[0]
    qkv = first.attention.qkv
    pair = 3 if isinstance(qkv, ColumnParallel) and qkv.product is F.linear else 2
    repeated, layers = mlps_again(len(model.layers), model.recompute), list[tuple[int, int]]()
    for index in range(len(model.layers)):
        mlp = pair + 2 * (index in repeated)
        layers += [(2, pair), (2, mlp)] if model.cut_layers else [(4, pair + mlp)]
    sent = (model.tensor_ranks - 1) * model.config.hidden_size  # in one gather or scatter
    return [(forward * sent, backward * sent) for forward, backward in ((1, 1), *layers, (1, 1))]


class ColumnParallel(nn.Linear):
    """Rows (R, D) of this rank's tokens -> some outputs for all tokens, (B, S, outputs / T)."""

    def __init__(self, whole: nn.Linear, runs: Sequence[int], sharing: Sharing) -> None:
        biased = whole.bias is not None
        super().__init__(whole.in_features, whole.out_features // sharing.group.size, biased)
        self.group, self.overlapped = sharing.group, sharing.overlapped
        self.tokens, self.product = sharing.tokens, sharing.product()
        shared = sharing.split(0, *runs)
        self.tensor_splits = {"weight": shared} | ({"bias": shared} if biased else {})

    def forward(self, input: Tensor) -> Tensor:
        if self.product is F.linear:
            overlapped = self.overlapped and self.training
            out = GatheredLinear.apply(input, self.weight, self.bias, overlapped, self.group)
        else:
            out = self.product(Gather.apply(input, self.group), self.weight, self.bias)
        return out.unflatten(0, (-1, self.tokens))


class RowParallel(nn.Linear):
    """Some inputs of all tokens, (B, S, inputs / T) -> the rows of this rank's tokens, (R, D)."""

    def __init__(self, whole: nn.Linear, sharing: Sharing) -> None:
        super().__init__(whole.in_features // sharing.group.size, whole.out_features, whole.bias is not None)
        self.group, self.overlapped, self.product = sharing.group, sharing.overlapped, sharing.product()
        self.tensor_splits = {"weight": sharing.split(1, whole.in_features)}

    def forward(self, input: Tensor) -> Tensor:
        """See the class. The bias, which all ranks have whole, joins the sum over ranks once."""
        rows = input.flatten(0, 1)
        if self.product is F.linear:
            out = LinearScattered.apply(rows, self.weight, self.overlapped and self.training, self.group)
        else:
            out = ScatterSum.apply(self.product(rows, self.weight, None), self.group)
        return out if self.bias is None else out + self.bias


class VocabularyParallelEmbedding(nn.Embedding):
    """(B, S) ids -> the rows of this rank's tokens, (R, D); each rank has V / T entries of the table."""

    def __init__(self, entries: int, width: int, group: TensorGroup) -> None:
        super().__init__(entries, width, _weight=embedding(entries, width).weight.data)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        entries = input.flatten() - self.group.rank * self.num_embeddings
        elsewhere = (entries < 0) | (entries >= self.num_embeddings)
        found = F.embedding(entries.masked_fill(elsewhere, 0), self.weight)
        return ScatterSum.apply(found.masked_fill(elsewhere[:, None], 0.0), self.group)


class VocabularyParallelHead(Head):
    """The head of a model whose output weights are split by entries of the vocabulary."""

    def __init__(self, whole: Head, output: Any, sharing: Sharing) -> None:
        super().__init__(whole.norm, output, whole.objective, whole.multiplier)
        self.group, self._tokens = sharing.group, sharing.tokens
        self.passes = vocabulary_parallel_loss(self.group)

    def normalize(self, x: Tensor) -> Tensor:
        """(R, D) -> the norm of all tokens, (B · S, D)."""
        return Gather.apply(super().normalize(x), self.group)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B · S, D) and this rank's entries of the table -> (B, S, V). For inference alone."""
        parts = self.group.gather(F.linear(x, weight)[None])  # (T, B · S, V / T)
        return parts.movedim(0, 1).flatten(1).unflatten(0, (-1, self._tokens))

    def compile_loss(self, compiler: Compiler, fused: LossKernels | None) -> None:
        """See Head; `fused` is for whole vocabularies."""
        self.passes = vocabulary_parallel_loss(self.group, compiler)
