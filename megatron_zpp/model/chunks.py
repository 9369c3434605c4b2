"""The MLP half of a layer in chunks of rows, so that its memory does not grow with the sample.

As TiledMLP of Arctic Long Sequence Training (arXiv 2506.13996). Nothing that a chunk computes is kept but its
part of the output, and the backward computes the chunks again, one at a time.

Shapes: N rows, each the hidden state of a token of this rank; D hidden size.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.layer import Half, Layer

_MULTIPLE = 16  # rows of which 8-bit products take multiples


def rows_of_chunk(rows: int, chunks: int) -> int:
    """Rows of each of `chunks` chunks but the last, which may be smaller. There may be fewer chunks."""
    return min(rows, -(-rows // (chunks * _MULTIPLE)) * _MULTIPLE)


def chunk_shape(hidden: tuple[int, ...], chunks: int) -> tuple[int, ...]:
    """The shape of chunks of hidden states (B, T, D), which is (1, rows, D), or of (N, D)."""
    *others, width = hidden
    return *(1,) * (len(others) - 1), rows_of_chunk(math.prod(others), chunks), width


class ChunkedHalf(Half):
    """The half of the MLP in `chunks` chunks of rows; what computes one may be compiled."""

    def __init__(self, layer: Layer, chunks: int) -> None:
        super().__init__(layer, "mlp", layer.halves[1].multiplier)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) or (R, D) -> the same."""
        size = rows_of_chunk(x.shape[:-1].numel(), self.chunks)
        if not torch.is_grad_enabled():
            return self.outputs(x, size)
        return _Forward.apply(_Backward.apply(x, self, size, *self.parameters()), self, size)

    def outputs(self, x: Tensor, size: int) -> Tensor:
        """The output for x, in chunks of `size` rows, without its gradient."""
        out = x.new_empty(x.shape)
        for part, of_part in self.in_chunks(size, x, out):
            own = part.detach().requires_grad_(torch.is_grad_enabled())
            of_part.copy_(self.compute(self, own).detach())
        return out

    def in_chunks(self, size: int, x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Chunks of `size` rows of x and of tensors like it; the dropout of context ranks knows which."""
        chunks = zip(*(_parts(each, size) for each in (x, *others)), strict=True)
        placed = getattr(self.dropout, "in_chunks", None) if self.draws else None
        return chunks if placed is None else placed(chunks, size, x)

    @property
    def draws(self) -> bool:
        """Whether the half draws random numbers, which the backward repeats."""
        return self.training and getattr(self.dropout, "p", 0) > 0


def _parts(x: Tensor, size: int) -> Iterator[Tensor]:
    """Chunks of `size` rows; see `chunk_shape`."""
    for part in x.reshape(-1, x.shape[-1]).split(size):
        yield part if x.dim() == 2 else part[None]


class _Forward(torch.autograd.Function):
    """The output of all chunks; its gradient is that of the input of `_Backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: ChunkedHalf, size: int) -> Tensor:
        with _of_its_own():  # as the backward computes it, so that a compiler makes one graph for both
            return half.outputs(x, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Backward(torch.autograd.Function):
    """x as it is; takes the gradient of the output, and returns those of x and of the parameters.

    It is apart from `_Forward` because the recomputation of a layer stops at the last tensor that autograd
    saves, which is x. So full recomputation does not compute the MLP: the chunks do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: ChunkedHalf, size: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.half, ctx.size, ctx.state = half, size, None
        if half.draws:  # from the generator of the device
            ctx.state = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors  # before the parameters are read: what recomputes x may gather them
        half, size, needed = ctx.half, ctx.size, ctx.needs_input_grad
        trained = [one for one in half.parameters() if one.requires_grad]
        of_x, sums = x.new_empty(x.shape), list[Tensor]()
        with torch.random.fork_rng([x.device] if x.is_cuda else [], enabled=ctx.state is not None):
            if ctx.state is not None and x.is_cuda:  # draw again what the forward drew
                torch.cuda.set_rng_state(ctx.state, x.device)
            elif ctx.state is not None:
                torch.set_rng_state(ctx.state)
            for own, of_out, of_part in half.in_chunks(size, x, gradient, of_x):
                part = own.detach().requires_grad_()
                with _of_its_own():
                    out = half.compute(half, part)
                found, *others = torch.autograd.grad(out, (part, *trained), of_out)
                of_part.copy_(found)
                if sums:
                    torch._foreach_add_(sums, others)
                else:  # chunks are added in fp32, so that their number rounds nothing
                    sums = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in others]
                del out, found, others  # before the next chunk needs as much
        summed = iter([total.to(one.dtype) for total, one in zip(sums, trained, strict=True)])
        of_parameters = (next(summed) if wanted else None for wanted in needed[3:])
        return of_x if needed[0] else None, None, None, *of_parameters


@contextmanager
def _of_its_own() -> Iterator[None]:
    """Record what a chunk saves, unseen by those who recompute or offload what layers save."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
