"""A model whose samples context ranks share: each rank has some tokens of every sample."""

from functools import partial

from torch import Tensor, nn

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.context.dropout import PlacedDropout
from megatron_zpp.model.context.heads import AllToAllHeads
from megatron_zpp.model.context.parts import from_parts, own_part
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import Layer


def share_samples(model: GPT, group: TensorGroup, tensor_rank: int = 0) -> None:
    """Leave this rank of `group` its tokens of every sample; the model's attention is `context_kernel`'s."""
    model.part = partial(own_part, ranks=group.size, rank=group.rank)
    model.joined = partial(_joined, group=group)
    p = model.config.hidden_dropout
    if p > 0:
        tokens = model.config.seq_length
        dropout = PlacedDropout(p, tokens, group.size, group.rank, tensor_rank)
        owners: list[nn.Module] = [model.embedding]
        for layer in model.layers:
            assert isinstance(layer, Layer)
            owners += [layer, *layer.halves]
        for owner in owners:
            owner.dropout = dropout


def context_kernel(
    kernel: AttentionKernel, group: TensorGroup, comm_type: str, heads: int
) -> AttentionKernel:
    """Attention by `kernel` among the ranks of `group`, which have so many heads of their tokens.

    `comm_type` is a2a, p2p, or auto: a2a where the ranks divide the heads.
    """
    return AllToAllHeads(kernel, group)


def exchanges_of_attention(model: GPT) -> tuple[int, int]:
    """Elements that forward and backward of each layer's attention send per row of a rank.

    A selective recomputation sends those of the forward again.
    """
    first = model.layers[0]
    assert isinstance(first, Layer)
    attention, kernel = first.attention, first.attention.kernel
    assert isinstance(kernel, AllToAllHeads)
    forward, backward = (
        model.tensor_ranks * each
        for each in kernel.sent(attention.heads, attention.groups, attention.head_width)
    )
    return forward, backward + (forward if attention.recompute_scores else 0)


def _joined(own: Tensor, *, group: TensorGroup) -> Tensor:
    """This rank's tokens of samples (B, S / C, …) -> all (B, S, …). For inference alone."""
    return from_parts(group.gather(own[None]))
