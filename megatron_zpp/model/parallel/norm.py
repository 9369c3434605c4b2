"""Norms of the heads of all tensor ranks together (--qk-layernorm-across-heads).

Shapes: T ranks, W width of all heads; a rank has W / T of it, and so much of the gains.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.layer import Norm
from megatron_zpp.placement import Split


class NormAcrossRanks(nn.Module):
    """A LayerNorm or an RMSNorm: (…, W / T) -> (…, W / T).

    The forward exchanges a sum of squares per token, and for a LayerNorm a sum before it. The backward
    exchanges one sum, or two at once. All are in fp32, or in fp64 if x is.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, whole: Norm, split: Split, group: TensorGroup) -> None:
        super().__init__()
        assert whole.eps is not None, "norm_of gives it"
        (self.width,), self.eps, self.group = whole.normalized_shape, whole.eps, group
        self.offset = getattr(whole, "offset", 0.0)  # of the gains
        self.tensor_splits = {}
        for name in ("weight", "bias"):
            if getattr(whole, name, None) is None:  # an RMSNorm has no bias
                self.register_parameter(name, None)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(self.width // group.size)))
                self.tensor_splits[name] = split

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.bias, self)


class _Norm(torch.autograd.Function):
    """Keeps x, and one or two numbers per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormAcrossRanks) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = None
        if bias is not None:
            mean = norm.group.sum(wide.sum(-1, keepdim=True)) / norm.width
            wide = wide - mean
        squares = norm.group.sum(wide.square().sum(-1, keepdim=True)) / norm.width
        scale = torch.rsqrt(squares + norm.eps)  # (…, 1), as the mean
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.norm = norm
        out = wide * scale * (weight.to(wide.dtype) + norm.offset)
        out = out if bias is None else out + bias
        # torch 2.11 compiles a forward that ends with a cast to the format it has without its gradients.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        norm, dtype = ctx.norm, scale.dtype
        normed = (x.to(dtype) if mean is None else x.to(dtype) - mean) * scale
        wide = gradient.to(dtype)
        of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        of_bias = None if mean is None else wide.flatten(0, -2).sum(0).to(weight.dtype)
        of_normed = wide * (weight.to(dtype) + norm.offset)
        sums = [(of_normed * normed).sum(-1, keepdim=True)]
        if mean is not None:
            sums.append(of_normed.sum(-1, keepdim=True))
        along, *constant = norm.group.sum(torch.cat(sums, -1)).split(1, -1)
        of_x = of_normed - normed * (along / norm.width)
        if constant:
            of_x = of_x - constant[0] / norm.width
        return (of_x * scale).to(x.dtype), of_weight, of_bias, None
