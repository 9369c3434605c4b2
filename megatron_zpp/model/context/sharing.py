"""A model whose samples context ranks share: each rank has some tokens of every sample."""

from functools import partial

from torch import nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.context.dropout import PlacedDropout
from megatron_zpp.model.context.heads import AllToAllHeads
from megatron_zpp.model.context.parts import chunks_of, from_parts, own_part
from megatron_zpp.model.gpt import GPT


def share_samples(model: GPT, group: TensorGroup, tensor_rank: int = 0) -> None:
    """Leave this rank of `group` its tokens of every sample; the model's attention is `context_kernel`'s."""
    model.part = partial(own_part, ranks=group.size, rank=group.rank)
    model.joined = lambda own: from_parts(group.gather(chunks_of(own)[None]))  # for inference alone
    p = model.config.hidden_dropout
    if p > 0:
        tokens = model.config.seq_length
        dropout = PlacedDropout(p, tokens, group.size, group.rank, tensor_rank)
        owners: list[nn.Module] = [model.embedding]
        for layer in model.layers:
            owners += [layer, *layer.halves]
        for owner in owners:
            owner.dropout = dropout


def context_kernel(
    kernel: AttentionKernel, group: TensorGroup, comm_type: str, heads: int
) -> AttentionKernel:
    """Attention by `kernel` among the ranks of `group`, which have so many heads of their tokens.

    `comm_type` is a2a, p2p, or auto, as --cp-comm-type.
    """
    if exchanges_heads(comm_type, group.size, heads):
        return AllToAllHeads(kernel, group)
    from megatron_zpp.model.context.ring import Ring

    return Ring(kernel, group)


def exchanges_heads(comm_type: str, ranks: int, heads: int) -> bool:
    """Whether `ranks` exchange heads, and not keys and values around a ring."""
    return comm_type == "a2a" or (comm_type == "auto" and heads % ranks == 0)


def exchanges_of_attention(
    config: ModelConfig, kernel: AttentionKernel, tensor_ranks: int, *, selective: bool
) -> list[tuple[int, int]]:
    """Elements that forward and backward of each layer's attention send per token of a rank.

    A selective recomputation sends them again until it has what the backward needs, which is behind all
    exchanges but that of results. `tensor_ranks` share the heads.
    """
    heads, width, found = config.num_attention_heads // tensor_ranks, config.kv_channels, []
    for window in config.layer_windows:
        groups = config.num_query_groups // tensor_ranks
        forward, backward, behind = kernel.sent(heads, groups, width, config.seq_length, window)
        found.append((forward, backward + (forward - behind) * selective))
    return found
