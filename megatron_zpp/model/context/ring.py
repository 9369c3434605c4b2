"""Ring attention: keys and values of context ranks go round (Ring Attention, 2310.01889).

Shapes: B batch, S tokens of a sample, C context ranks, T = S / C tokens of this rank, L = S / 2C tokens of a
chunk, N query heads, G heads of keys and values (G divides N), H head width.

A rank has two chunks of every sample (model/context/parts.py). In round d it attends to those of the rank d
places before it, while those of the next round are on their way; the results are merged by the logarithms of
their sums of exponentials. In the backward keys and values travel again, and their gradients return to their
own rank beside the next round. Chunks go straight to a rank that needs them, and only those in which a query
there sees a key under the causal mask and a window; what documents hide is known by the device alone.

Inside a compiled layer forward and backward are one operator each. With FlexAttention, which is compiled
itself, they run between two graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op
from torch.nn.attention import SDPBackend

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel, DotProduct, PackedFlash
from megatron_zpp.model.attention_choice import FLAG
from megatron_zpp.model.context.blocks import (
    BlockKernel,
    BlocksInMemory,
    FlexBlocks,
    FusedBlocks,
    Merged,
    Sums,
    of_chunks,
    of_sinks,
)
from megatron_zpp.model.context.parts import own_part
from megatron_zpp.model.context.rounds import Pair, Round, rounds
from megatron_zpp.model.context.travel import send_home, travelling_keys
from megatron_zpp.model.masks import Mask, first_seen
from megatron_zpp.model.scores import Scores

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from megatron_zpp.model.context.rounds import Block

_FUSED = {SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION}
_CHOOSES, _MATH = -1, 0  # torch's choice of a backend, and its number of math


@dataclass(frozen=True)
class Seen:
    """The first key (B, T) int32 of a sample that each own token sees; it sees those from there up to itself.

    `blocks` are FlexAttention's, which layers of one forward pass share.
    """

    first: Tensor
    blocks: "dict[Block, BlockMask]" = field(default_factory=dict)


class Ring(AttentionKernel):
    """Attention over samples of which each rank of `group` has two chunks; `kernel` is that of one rank.

    Causal attention to plain scores takes flash attention or cuDNN's kernel. Windows, documents and other
    scores take FlexAttention where `kernel` is it or PackedFlash; otherwise scores are in memory.
    """

    def __init__(self, kernel: AttentionKernel, group: TensorGroup) -> None:
        """Raises ValueError for a kernel that tells no sums of exponentials."""
        if not isinstance(kernel, DotProduct) or kernel.backend is SDPBackend.EFFICIENT_ATTENTION:
            name = "efficient" if isinstance(kernel, DotProduct) else "flash3"
            fix = "has no blocks for --cp-comm-type p2p; use auto, flash or cudnn, or --cp-comm-type a2a"
            raise option_error(FLAG, name, fix)
        if isinstance(kernel, PackedFlash):
            from megatron_zpp.model.flex import Flex

            self._flex: Any = Flex()
        else:
            self._flex = kernel if kernel.compiled else None
        self._kernel, self._group = kernel, group
        self._backend = _CHOOSES if kernel.backend is None else int(kernel.backend.value)
        self.compiled, self.splits_graphs, self.context_ranks = kernel.compiled, bool(self._flex), group.size
        self._known: dict[tuple[Any, ...], Seen] = {}

    def describe(self) -> str:
        blocks = (self._flex or self._kernel).describe()
        return f"ring of {self.context_ranks} context ranks{blocks and f', {blocks}'}"

    def sent(
        self, heads: int, groups: int, head_width: int, tokens: int, window: int | None
    ) -> tuple[int, int, int]:
        """See AttentionKernel. As many keys and values of one chunk are sent as this rank has tokens."""
        others = rounds(self.context_ranks, self._group.rank, tokens, window)[1:]
        sent, returned = sum(len(each.sent) for each in others), sum(len(each.received) for each in others)
        return sent * groups * head_width, (sent + returned) * groups * head_width, 0

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> Seen | None:
        """(B, T, …) -> what each token sees; None: causal, for kernels that know it."""
        if ends is not None:
            return Seen(self._first_seen(x, window, ends))
        if window is None and not self._flex:
            return None
        key = *x.shape[:2], window, x.device  # for each of which it is made once
        if key not in self._known:
            with torch.inference_mode(False):  # a graph may keep it for a backward
                self._known[key] = Seen(self._first_seen(x, window).contiguous())
        return self._known[key]

    def _first_seen(self, x: Tensor, window: int | None, ends: Tensor | None = None) -> Tensor:
        tokens = x.shape[1] * self.context_ranks
        whole = torch.arange(tokens, dtype=torch.int32, device=x.device)
        own = own_part(whole[None], self.context_ranks, self._group.rank)[0]
        return first_seen(own, tokens, window, ends, len(x))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T, G, H) -> (B, T, N, H); a cache is of whole samples."""
        if mask.cached:
            return self._kernel(q, k, v, dropout, mask, scores)
        assert dropout == 0.0, "check_context_ranks refuses it"
        causal = mask.window is None and not mask.documents
        plain = causal and scores.softcap is None and scores.slopes is None
        backend = self._backend if plain else _MATH
        if backend == _MATH and self._flex is not None:
            return self._by_flex(q, k, v, mask.bounds, mask.window, scores)
        ring = _Passes(self._group.name, mask.window, scores.scale, scores.softcap, backend)
        first = None if causal else mask.bounds.first
        return _Attention.apply(q, k, v, scores.sinks, scores.slopes, first, ring)

    @torch.compiler.disable
    def _by_flex(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, window: int | None, scores: Scores
    ) -> Tensor:
        kernel = FlexBlocks(self._flex, scores, seen.first, seen.blocks)
        ring = _Passes(self._group.name, window, scores.scale, scores.softcap, _MATH, kernel)
        return _Attention.apply(q, k, v, scores.sinks, None, None, ring)


@dataclass(frozen=True)
class _Passes:
    """Forward and backward over the rounds; `kernel` is that of blocks, if not chosen by the other fields."""

    group: str
    window: int | None
    scale: float | None
    softcap: float | None
    backend: int
    kernel: BlockKernel | None = None

    @property
    def constants(self) -> tuple[str, int | None, float | None, float | None, int]:
        """What an operator takes beside tensors."""
        return self.group, self.window, self.scale, self.softcap, self.backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What attention makes (B, T, N, H), and the logarithms of its sums of exponentials (B, N, T)."""
        group, merged, size = TensorGroup.named(self.group), Merged(), q.shape[1] // 2
        kernel = self.kernel or self._chosen(q, k, v, slopes, first)
        for each, keys, values in travelling_keys(k, v, group, self.window):
            for block in each.blocks(each.pairs, joined=kernel.joins):
                queries = of_chunks(q, block.queries, size)
                seen = (of_chunks(part, block.keys, size, each.received.start) for part in (keys, values))
                merged.add(block.queries, *kernel.forward(block, queries, *seen))
        return merged.result(q, sinks)

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sum: Tensor,
        slopes: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v.

        What the own second chunk sees of the first one is computed while the first keys travel, and what both
        see of themselves while the last gradients do.
        """
        group, size = TensorGroup.named(self.group), q.shape[1] // 2
        kernel = self.kernel or self._chosen(q, k, v, slopes, first)
        gradient, of_q, own = gradient.contiguous(), Sums(), (Sums(), Sums())

        def add(
            each: Round, pairs: Sequence[Pair], joined: bool, keys: Sequence[Tensor], sums: Sequence[Sums]
        ) -> None:
            """Add what `pairs` of a round make to the gradients of q and to `sums`, those of its keys."""
            for block in each.blocks(pairs, joined=joined):
                of_made, queries, made, made_sum = (
                    of_chunks(part, block.queries, size) for part in (gradient, q, out, log_sum.mT)
                )
                seen, weighed = (of_chunks(part, block.keys, size, each.received.start) for part in keys)
                made_sum = made_sum.mT.contiguous()
                found = kernel.backward(block, of_made, queries, seen, weighed, made, made_sum)
                for total, part in zip((of_q, *sums), found, strict=True):
                    total.add(block.queries if total is of_q else block.keys, part)

        travelling = travelling_keys(k, v, group, self.window)
        at_home, *keys = next(travelling)
        diagonal, below = at_home.pairs[:2], at_home.pairs[2:]
        add(at_home, below, kernel.joins, keys, own)
        add_returned: Callable[[Sequence[Sums]], None] = lambda own: None  # noqa: E731
        for each, *keys in travelling:
            sums = Sums(), Sums()
            add(each, each.pairs, kernel.joins, keys, sums)
            following = send_home(each, sums, k, group)
            add_returned(own)
            add_returned = following
        del keys
        add(at_home, diagonal, False, (k, v), own)
        add_returned(own)
        return of_q.result(q), own[0].result(k), own[1].result(v)

    def _chosen(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, first: Tensor | None
    ) -> BlockKernel:
        """The kernel of blocks for these tensors, which is the same in both passes."""
        grouped, backend = q.shape[2] != k.shape[2], SDPBackend.MATH
        if self.backend != _MATH and not q.is_cuda:
            backend = SDPBackend.MATH if grouped else SDPBackend.FLASH_ATTENTION  # torch 2.8's has no groups
        elif self.backend == _CHOOSES:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            number = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=self.scale, enable_gqa=grouped)
            backend = SDPBackend(number)
        elif self.backend != _MATH:
            backend = SDPBackend(self.backend)
        if backend in _FUSED and q.shape[-1] % 8 == 0:
            return FusedBlocks(backend, self.scale)
        return BlocksInMemory(Scores(self.scale, self.softcap, slopes), first)


class _Attention(torch.autograd.Function):
    """Queries (B, T, N, H), keys and values (B, T, G, H), sinks (N) -> (B, T, N, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        first: Tensor | None,
        ring: _Passes,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            out, log_sum = _ring_attention(q, k, v, sinks, slopes, first, *ring.constants)
        else:
            out, log_sum = ring.forward(q, k, v, sinks, slopes, first)
        ctx.save_for_backward(q, k, v, out, log_sum, sinks, slopes, first)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks, slopes, first = ctx.saved_tensors
        inputs, ring = (gradient, q, k, v, out, log_sum, slopes, first), ctx.ring
        if torch.compiler.is_compiling():
            found = _ring_attention_backward(*inputs, *ring.constants)
        else:
            found = ring.backward(*inputs)
        lost = of_sinks(gradient, out, log_sum, sinks) if ctx.needs_input_grad[3] else None
        return *found, lost, None, None, None


_CONSTANTS = "str group, SymInt? window, float? scale, float? softcap, SymInt backend"  # of `_Passes`


@custom_op(
    "megatron_zpp_model::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes, Tensor? first, "
    f"{_CONSTANTS}) -> (Tensor, Tensor)",
)
def _ring_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _Passes(*arguments[6:]).forward(*arguments[:6])


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    log_sum = q.new_empty(batch, heads, tokens, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), log_sum


@custom_op(
    "megatron_zpp_model::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, Tensor? slopes, "
    f"Tensor? first, {_CONSTANTS}) -> (Tensor, Tensor, Tensor)",
)
def _ring_attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Passes(*arguments[8:]).backward(*arguments[:8])


@_ring_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
