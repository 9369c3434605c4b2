"""Kernels of a ring for one block of queries and keys, and how what they make is summed.

Shapes: B batch, Q queries and K keys of a block, L tokens of a chunk, T = 2L of this rank, N query heads, G
heads of keys and values (G divides N), H head width.

A kernel's forward takes queries (B, Q, N, H), keys and values (B, K, G, H), and returns what attention to the
block's keys makes (B, Q, N, H), and the logarithms of its sums of exponentials (B, N, Q). Its backward gets
the same of all keys, and returns this block's part of the gradients of queries, keys and values. One that
`joins` takes blocks of both chunks, because it needs no positions.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron_zpp.model.context.rounds import Block
from megatron_zpp.model.scores import Scores

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from megatron_zpp.model.flex import Flex

Gradients = tuple[Tensor, Tensor, Tensor]
_aten = torch.ops.aten
_HIDDEN = -1e30  # score of a key that is not seen: finite, so that a query which sees no key makes no NaN


class FusedBlocks:
    """Flash attention or cuDNN's kernel for causal attention, with scores that are only scaled."""

    joins = True

    def __init__(self, backend: SDPBackend, scale: float | None) -> None:
        self._backend, self._scale = backend, scale

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inputs, scale = [part.transpose(1, 2) for part in (q, k, v)], self._scale
        if not q.is_cuda:
            made = _aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, block.causal, scale=scale)
        elif self._backend is SDPBackend.FLASH_ATTENTION:
            made = _aten._scaled_dot_product_flash_attention(*inputs, 0.0, block.causal, False, scale=scale)
        else:
            made = _aten._scaled_dot_product_cudnn_attention(
                *inputs, None, True, 0.0, block.causal, False, scale=scale
            )
        return made[0].transpose(1, 2), made[1].view(made[1].shape[:3])  # cuDNN's are (B, N, Q, 1)

    def backward(
        self, block: Block, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> Gradients:
        inputs = [part.transpose(1, 2) for part in (gradient, q, k, v, out)]
        scale, causal = self._scale, block.causal
        if not q.is_cuda:
            backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = backward(*inputs, log_sum, 0.0, causal, scale=scale)
        else:
            unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the seed and offset of dropout
            lengths: tuple[Any, ...] = None, None, q.shape[1], k.shape[1], 0.0, causal
            if self._backend is SDPBackend.FLASH_ATTENTION:
                backward = _aten._scaled_dot_product_flash_attention_backward
                found = backward(*inputs, log_sum, *lengths, unused, unused, scale=scale)
            else:
                backward = _aten._scaled_dot_product_cudnn_attention_backward
                found = backward(*inputs, log_sum[..., None], unused, unused, None, *lengths, scale=scale)
        of_q, of_k, of_v = (part.transpose(1, 2) for part in found)
        return of_q, of_k, of_v


class BlocksInMemory:
    """Scores of a block in memory, in fp32 at least; `first` (B, T): see Ring, None: causal."""

    joins = False

    def __init__(self, scores: Scores, first: Tensor | None) -> None:
        self._scores, self._first = scores, first

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = _by_group(q, k.shape[2]), _exact(k), _exact(v)
        scores, _ = self._scores_of(q, k, block)
        log_sum = scores.logsumexp(-1)  # (B, G, N / G, Q)
        out = torch.einsum("bgrqk,bkgh->bqgrh", torch.exp(scores - log_sum[..., None]), v)
        return out.flatten(2, 3), log_sum.flatten(1, 2)

    def backward(
        self, block: Block, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> Gradients:
        groups = k.shape[2]
        gradient, q, out = (_by_group(part, groups) for part in (gradient, q, out))
        k, v = _exact(k), _exact(v)
        scores, slope = self._scores_of(q, k, block)
        weights = torch.exp(scores - log_sum.unflatten(1, (groups, -1))[..., None])
        of_weights = torch.einsum("bqgrh,bkgh->bgrqk", gradient, v)
        of_scores = weights * (of_weights - (gradient * out).sum(-1).permute(0, 2, 3, 1)[..., None]) * slope
        of_q = torch.einsum("bgrqk,bkgh->bqgrh", of_scores, k)
        of_k = torch.einsum("bgrqk,bqgrh->bkgh", of_scores, q)
        return of_q.flatten(2, 3), of_k, torch.einsum("bgrqk,bqgrh->bkgh", weights, gradient)

    def _scores_of(self, q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | float]:
        """Scores (B, G, N / G, Q, K), and their derivative by a query times a key."""
        scale = q.shape[-1] ** -0.5 if self._scores.scale is None else self._scores.scale
        scores, slope = torch.einsum("bqgrh,bkgh->bgrqk", q, k) * scale, scale
        if (cap := self._scores.softcap) is not None:
            tanh = torch.tanh(scores / cap)
            scores, slope = cap * tanh, scale * (1 - tanh.square())
        tokens = torch.arange(q.shape[1], device=q.device)
        queries, keys = tokens[:, None] + block.query_start, tokens + block.key_start
        if self._scores.slopes is not None:
            slopes = self._scores.slopes.to(scores.dtype).view(q.shape[2:4])[..., None, None]
            scores = scores + slopes * (keys - queries)
        hidden = keys > queries
        if self._first is not None:
            first = of_chunks(self._first, block.queries, q.shape[1])
            hidden = hidden | (keys < first[:, None, None, :, None])
        return scores.masked_fill(hidden, _HIDDEN), slope


class FlexBlocks:
    """FlexAttention, whose own backward also makes the log sums' part of the gradients."""

    joins = False

    def __init__(self, flex: "Flex", scores: Scores, first: Tensor, masks: "dict[Block, BlockMask]") -> None:
        """`first` (B, T): see Ring; `masks` keeps those of blocks for further layers."""
        self._flex, self._scores, self._first, self._masks = flex, scores, first, masks

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._attend(block, *(part.clone() for part in (q, k, v)))

    def _attend(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, of tensors that are no parts of others: a graph would be compiled for each part."""
        shift = block.query_start - block.key_start
        if block not in self._masks:
            with torch.inference_mode(False):  # a graph may keep it for a backward
                first = of_chunks(self._first, block.queries, q.shape[1]) - block.key_start
                self._masks[block] = self._flex.block_mask(first, shift)
        return self._flex.with_log_sum(q, k, v, self._masks[block], self._scores, shift)

    def backward(
        self, block: Block, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> Gradients:
        """Computes the block's forward again, which it merged with others."""
        inputs = [part.detach().clone().requires_grad_() for part in (q, k, v)]
        with torch.enable_grad():
            own, own_sum = self._attend(block, *inputs)
        share = torch.exp(own_sum - log_sum).detach()  # (B, N, Q), 0 for a query that sees no key
        of_share = (gradient * (own.detach() - out)).sum(-1, dtype=share.dtype).transpose(1, 2)
        of_own = (gradient * _by_head(share)).to(own.dtype)
        of_q, of_k, of_v = torch.autograd.grad((own, own_sum), inputs, (of_own, share * of_share))
        return of_q, of_k, of_v


BlockKernel: TypeAlias = FusedBlocks | BlocksInMemory | FlexBlocks


class Merged:
    """Attention to some keys after others, by chunk of queries, in fp32 at least."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, chunks: range, out: Tensor, log_sum: Tensor) -> None:
        """Add what a block made for its `chunks` of queries; the first block of a chunk hides no query."""
        parts = zip(chunks, out.chunk(len(chunks), 1), log_sum.chunk(len(chunks), 2), strict=True)
        for chunk, more, more_sum in parts:
            if chunk not in self._chunks:
                self._chunks[chunk] = more, more_sum
                continue
            before, before_sum = self._chunks[chunk]
            kept, share = (_by_head(torch.sigmoid(x)) for x in (before_sum - more_sum, more_sum - before_sum))
            merged = torch.addcmul(before * kept, more, share)  # wide, as weights are: no other copies
            self._chunks[chunk] = merged, torch.logaddexp(before_sum, more_sum)

    def result(self, like: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """All (B, T, N, H), in the format of `like`, and logarithms (B, N, T); `sinks` (N) join the sums."""
        out, size = torch.empty(like.shape, dtype=like.dtype, device=like.device), like.shape[1] // 2
        batch, tokens, heads = like.shape[:3]
        log_sum = self._chunks[0][1].new_empty(batch, heads, tokens)
        for chunk, (part, part_sum) in self._chunks.items():
            rows = slice(chunk * size, (chunk + 1) * size)
            if sinks is not None:
                whole = torch.logaddexp(part_sum, sinks.to(part_sum.dtype)[:, None])
                part = _exact(part) * _by_head(torch.exp(part_sum - whole))
                part_sum = whole
            out[:, rows], log_sum[:, :, rows] = part, part_sum
        return out, log_sum


class Sums:
    """Sums of gradients by chunk of tokens, in fp32 at least; the last term is added where they are read."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[Tensor]] = {}  # the sum up to now if there are two, and the last term

    def add(self, chunks: range, gradient: Tensor) -> None:
        """Add a gradient (B, tokens of `chunks`, …), whose memory is kept."""
        for chunk, part in zip(chunks, _chunks(gradient, len(chunks)), strict=True):
            terms = self._chunks.setdefault(chunk, [])
            if len(terms) == 2:
                terms[:] = [_sum(terms[0], terms[1])]
            terms.append(part)

    def into(self, out: Tensor, chunks: range) -> None:
        """Move those of `chunks` to `out`, one behind the other."""
        for chunk, part in zip(chunks, _chunks(out, len(chunks)), strict=True):
            terms = self._chunks.pop(chunk)
            if len(terms) == 2:
                _sum(terms[0], terms[1], out=part)
            else:
                part.copy_(terms[0])

    def result(self, like: Tensor) -> Tensor:
        """Those of both chunks, in the shape and format of `like`."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.into(out, range(2))
        return out


def of_sinks(gradient: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks (N), of attention in which they took part."""
    share = torch.exp(sinks.to(log_sum.dtype)[:, None] - log_sum)  # (B, N, T)
    lost = (_exact(gradient) * out).sum(-1).transpose(1, 2)
    return -(share * lost).sum((0, 2)).to(sinks.dtype)


def of_chunks(x: Tensor, chunks: range, size: int, first: int = 0) -> Tensor:
    """Of rows (B, …, …) that begin with chunk `first`, the ones of `chunks` of `size` tokens."""
    return x[:, (chunks.start - first) * size : (chunks.stop - first) * size]


def _chunks(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` equal parts of rows (B, …, …), none if they are empty."""
    return x.chunk(count, 1) if count else ()


def _by_head(x: Tensor) -> Tensor:
    """(B, N, Q) -> (B, Q, N, 1)."""
    return x.transpose(1, 2)[..., None]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(B, Q, N, H) -> (B, Q, G, N / G, H), in fp32 at least."""
    return _exact(x).unflatten(2, (groups, -1))


def _sum(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of two terms, in fp32 at least, or in the format of `out`; in one pass, without wide copies."""
    one = x.new_ones(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.addcmul(x, y, one, out=out)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
