"""Builds a model with the modules of a run: norms, matmuls, those of tensor ranks."""

from collections.abc import Mapping
from itertools import count

from torch import nn

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel, DotProduct
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import TORCH_NORMS, Norm
from megatron_zpp.model.matmuls import PLAIN_MATMULS, Matmuls


def build_model(
    config: ModelConfig,
    entries: int,
    recompute: RecomputeConfig | None = None,
    attention: AttentionKernel | None = None,
    *,
    cut_layers: bool = False,
    norms: Mapping[str, type[Norm]] = TORCH_NORMS,
    matmuls: Matmuls = PLAIN_MATMULS,
    group: TensorGroup | None = None,
    overlapped: bool = False,
    context: TensorGroup | None = None,
    comm_type: str = "auto",
) -> GPT:
    """The model of a run, or one rank's part of it if a `group` of tensor ranks shares it.

    `norms` by --normalization. `overlapped`: tensor ranks compute beside their exchanges. The ranks of
    `context` share samples, and exchange what attention needs as `comm_type` (--cp-comm-type) says.
    """
    tokens = config.seq_length
    if context is not None:
        from megatron_zpp.model.context.sharing import context_kernel, share_samples

        heads = config.num_attention_heads // (1 if group is None else group.size)
        attention = context_kernel(attention or DotProduct(), context, comm_type, heads)
        tokens //= context.size
    model = GPT(config, entries, recompute, attention, cut_layers=cut_layers)
    if context is not None:
        share_samples(model, context, 0 if group is None else group.rank)
    if norms is not TORCH_NORMS:
        use_norms(model, norms)
    if group is None:
        use_matmuls(model, matmuls)
    else:
        from megatron_zpp.model.parallel.layers import Sharing, share_layers, share_tables

        sharing = Sharing(group=group, tokens=tokens, product=matmuls.product, overlapped=overlapped)
        share_layers(model, sharing)
        share_tables(model, sharing)
    if matmuls.output is not None:
        model.head.product = matmuls.output()
    return model


def exchanges_of(model: GPT) -> list[tuple[int, int]]:
    """Elements that forward and backward of each unit send per token of a rank, in the order of units.

    Tensor and context ranks divide the tokens of a micro-batch among them. Recomputed layers send those of
    their forward once more, which their units' forwards count. Empty where no ranks share the model.
    """
    if model.tensor_ranks * model.attention.context_ranks == 1:
        return []
    units = [name for name, _ in model.units()]
    sent = [(0, 0)] * len(units)
    if model.tensor_ranks > 1:
        from megatron_zpp.model.parallel.layers import exchanges_of_rows

        sent = exchanges_of_rows(model)
    if model.attention.context_ranks > 1:
        from megatron_zpp.model.context.sharing import exchanges_of_attention

        ranks, selective = model.tensor_ranks, model.layers[0].attention.recompute_scores
        more = exchanges_of_attention(model.config, model.attention, ranks, selective=selective)
        firsts = count(units.index("layers.0"), 2 if model.cut_layers else 1)
        for unit, (forward, backward) in zip(firsts, more, strict=False):
            sent[unit] = sent[unit][0] + ranks * forward, sent[unit][1] + ranks * backward
    return sent


def norm_classes(backend: str) -> Mapping[str, type[Norm]]:
    """Return the norms of the fused backend "torch" or "apex", by --normalization."""
    if backend == "torch":
        return TORCH_NORMS
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    return {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}


def use_norms(model: GPT, norms: Mapping[str, type[Norm]]) -> None:
    """Replace all norms of a model."""
    kind, made = norms[model.config.normalization], dict[nn.Module, nn.Module]()
    halves = [half for layer in model.layers for half in layer.halves]  # which layers do not register
    for owner in [*model.modules(), *halves]:
        for name, norm in owner.named_children():
            if type(norm) in TORCH_NORMS.values():
                if norm not in made:
                    made[norm] = kind(norm.normalized_shape, eps=model.config.norm_epsilon)
                setattr(owner, name, made[norm])


def use_matmuls(model: GPT, matmuls: Matmuls) -> None:
    """Replace the linear maps of a model's layers."""
    if matmuls.linear is nn.Linear:
        return
    for layer in model.layers:
        for owner in (layer.attention, layer.mlp):
            for name, linear in owner.named_children():
                if isinstance(linear, nn.Linear):
                    biased = linear.bias is not None
                    setattr(owner, name, matmuls.linear(linear.in_features, linear.out_features, bias=biased))
