"""A program: the Triton kernels of model/fused_*.py by Triton's interpreter, on CPUs, against float64.

It wants TRITON_INTERPRET=1, which Triton reads when the kernels are declared. What torch would wrap for its
compiler is called as it is. Of number formats fp32 and fp16: the interpreter truncates to bf16.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model import loss
from megatron_zpp.model.fused import blocks as fused_blocks
from megatron_zpp.model.fused import linear as fused_linear
from megatron_zpp.model.fused import loss as fused_loss
from megatron_zpp.model.fused import norm as fused_norm
from megatron_zpp.model.fused import rotary as fused_rotary
from megatron_zpp.model.fused import swiglu as fused_swiglu
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import PLAIN_BLOCK, swiglu, transformer_block
from megatron_zpp.model.rotary import RotaryEmbedding
from tests.model.variants import LLAMA

for module in (fused_norm, fused_linear, fused_rotary, fused_swiglu):
    module.wrap_triton = lambda kernel: kernel


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def reciprocal(x):
    return 1.0 / x


fused_linear.exp2 = fused_loss.exp2 = fused_swiglu.exp2 = (
    exp2  # the interpreter knows no instructions of GPUs
)
fused_linear.reciprocal = fused_swiglu.reciprocal = reciprocal

Function = Callable[..., list[Tensor]]


def same(ours: Function, torchs: Function, x: list[Tensor], modules: list[nn.Module]) -> None:
    """Results and all gradients have at most twice the error of torch's in the same format."""
    wide = [part.detach().double().requires_grad_() for part in x]
    copies = [type(module)(*sizes(module)).double() for module in modules]
    for copy, module in zip(copies, modules, strict=True):
        copy.load_state_dict(module.state_dict())
    draw, found = torch.Generator().manual_seed(5), {}
    weights = [torch.randn(part.shape, generator=draw) for part in torchs(*x, *modules)]
    for name, function, tensors, parts in (
        ("exact", torchs, wide, copies),
        ("torch", torchs, x, modules),
        ("ours", ours, x, modules),
    ):
        out = function(*tensors, *parts)
        wanted = [*tensors, *(parameter for part in parts for parameter in part.parameters())]
        given = [weight.to(part.dtype) for weight, part in zip(weights, out, strict=True)]
        found[name] = [*out, *torch.autograd.grad(out, wanted, given)]
    for mine, theirs, exact in zip(found["ours"], found["torch"], found["exact"], strict=True):
        error, allowed = (torch.linalg.vector_norm(part.double() - exact) for part in (mine, theirs))
        smallest = 4 * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(exact)
        assert error <= 2 * allowed + smallest, (error, allowed)


def sizes(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return (len(module.weight),)
    return module.in_features, module.out_features


def norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, added = torch.randn(2, rows, width)
    x[::3] += 5.0
    modules = [nn.LayerNorm(width) for _ in range(2)]
    for module in modules:
        module.weight.data += 0.2 * torch.randn(width)
        module.bias.data += 0.2 * torch.randn(width)

    def ours(
        x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: nn.LayerNorm, second: nn.LayerNorm
    ) -> list[Tensor]:
        normed, token = fused_norm.norm(x, first)
        total, again = fused_norm.add_norm(
            x, added * normed + before.detach(), token, second, (before, after)
        )
        return [normed, total + after.detach(), again]

    def torchs(
        x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: nn.LayerNorm, second: nn.LayerNorm
    ) -> list[Tensor]:
        normed = first(x)
        total = x + (added * normed + before)
        return [normed, total + after, second(total)]

    tensors = [part.to(dtype).requires_grad_() for part in (x, added, *torch.randn(2, width))]
    same(ours, torchs, tensors, [module.to(dtype) for module in modules])


def rms_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, added = torch.randn(2, rows, width)
    modules = [nn.RMSNorm(width, eps=1e-5) for _ in range(2)]
    for module in modules:
        module.weight.data += 0.2 * torch.randn(width)

    def ours(x: Tensor, added: Tensor, first: nn.RMSNorm, second: nn.RMSNorm) -> list[Tensor]:
        normed, token = fused_norm.norm(x, first)
        return [normed, *fused_norm.add_norm(x, added * normed, token, second)]

    def torchs(x: Tensor, added: Tensor, first: nn.RMSNorm, second: nn.RMSNorm) -> list[Tensor]:
        normed = first(x)
        total = x + added * normed
        return [normed, total, second(total)]

    tensors = [part.to(dtype).requires_grad_() for part in (x, added)]
    same(ours, torchs, tensors, [module.to(dtype) for module in modules])


def linears(rows: int, heads: int, head_width: int, inner: int, dtype: torch.dtype) -> None:
    width = heads * head_width
    modules = [nn.Linear(width, 3 * width), nn.Linear(width, inner)]

    def ours(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
        parts = fused_linear.heads_of_linear(x, to_heads, heads, head_width)
        return [*parts, fused_linear.gelu_of_linear(x, into)]

    def torchs(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
        parts = to_heads(x).unflatten(-1, (3, heads, head_width)).unbind(2)
        return [*parts, F.gelu(into(x), approximate="tanh")]

    x = torch.randn(2, rows, width).to(dtype).requires_grad_()
    same(ours, torchs, [x], [module.to(dtype) for module in modules])


def rows_of_logits(tokens: int, entries: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(tokens, entries)).to(dtype)
    targets = torch.randint(vocab_size, (tokens,))
    targets[1], logits[0, targets[0]] = loss.IGNORED, 30.0
    exact, mine = logits.double(), logits.clone()
    expected = loss.logits_to_gradient(exact, targets, vocab_size)
    found = fused_loss.logits_to_gradient(mine, targets, vocab_size)
    assert abs(found - expected) <= 1e-6 * expected
    allowed = torch.finfo(dtype).eps if dtype == torch.float16 else 1e-6
    assert (mine.double() / loss.unit(dtype) - exact).abs().max() <= allowed
    assert torch.count_nonzero(mine[1]) == torch.count_nonzero(mine[:, vocab_size:]) == 0


def sums(rows: int, dtype: torch.dtype) -> None:
    for given in (torch.randn(rows, 500), torch.randn(rows, 500).to(dtype)):
        factor = torch.tensor(0.3)
        expected = loss.scaled(given.clone(), factor, dtype)
        torch.testing.assert_close(fused_loss.scaled(given, factor, dtype), expected, rtol=0, atol=0)


def gates(rows: int, inner: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(2, rows, 2 * inner)).to(dtype).requires_grad_()
    same(lambda x: [fused_swiglu.swiglu(x)], lambda x: [swiglu(x)], [x], [])


def rotations(
    rows: int, heads: int, groups: int, width: int, rotated: int, shared: bool, dtype: torch.dtype
) -> None:
    """Of texts with the same positions, or each with its own."""
    positions = torch.arange(rows)[None] if shared else torch.randint(rows, (2, rows))
    rotation = RotaryEmbedding(rotated, 100.0).rotation(positions)

    def ours(x: Tensor) -> list[Tensor]:
        return [*fused_rotary.rotate_heads(x, heads, groups, width, rotation)]

    def torchs(x: Tensor) -> list[Tensor]:
        q, k, v = x.unflatten(-1, (-1, width)).split([heads, groups, groups], 2)
        return [rotation(q), rotation(k), v]

    x = torch.randn(2, rows, (heads + 2 * groups) * width).to(dtype).requires_grad_()
    same(ours, torchs, [x], [])


def layers(dropout: float, dtype: torch.dtype, **variant: Any) -> None:
    """A whole layer, whose dropout draws the same numbers in both."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=48,
        num_attention_heads=4,
        seq_length=8,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        **variant,
    )
    model = GPT(config, 64).initialize(3)
    layer, rotation = model.layers[0].to(dtype).train(), model.rotation(torch.arange(8)[None])
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape).to(dtype)
    x = torch.randn(2, 8, 48).to(dtype).requires_grad_()
    found = []
    for kernels in (fused_blocks.FusedKernels(layer), PLAIN_BLOCK):
        torch.manual_seed(7)
        out = transformer_block(layer, x, rotation=rotation, kernels=kernels)
        weights = torch.linspace(-1.0, 1.0, out.numel()).view(out.shape).to(dtype)
        found.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], weights)])
    rounding = 16 * torch.finfo(dtype).eps
    for mine, theirs in zip(*found, strict=True):
        error, size = (torch.linalg.vector_norm(part.double()) for part in (mine - theirs, theirs))
        assert error <= rounding * size, (error, size)


def main() -> None:
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.float16):
        for rows, width in ((1, 64), (5, 96), (7, 1000)):
            norms(rows, width, dtype)
            rms_norms(rows, width, dtype)
            gates(rows, 3 * width, dtype)
        for rotated in ((5, 3, 1, 40, 40), (7, 4, 4, 16, 8), (3, 70, 7, 8, 6)):
            rotations(*rotated, shared=True, dtype=dtype)
            rotations(*rotated, shared=False, dtype=dtype)
        for shape in ((1, 1, 8, 8), (17, 3, 40, 260), (33, 5, 64, 300)):
            linears(*shape, dtype)
        for dropout in (0.0, 0.2):
            layers(dropout, dtype)
            layers(dropout, dtype, **LLAMA)
            layers(dropout, dtype, **LLAMA | {"qk_layernorm": False, "rotary_percent": 0.5})
            layers(dropout, dtype, position_embedding_type="rope", qk_layernorm=True)
            layers(dropout, dtype, position_embedding_type="rope", swiglu=True)
            layers(dropout, dtype, add_qkv_bias=True, group_query_attention=True)
        rows_of_logits(4, 20096, 20001, dtype)
        rows_of_logits(3, 128, 128, dtype)
        sums(17, dtype)


if __name__ == "__main__":
    main()
