"""Scores of attention: what becomes of a query times a key before the mask, and the softmax over them.

Shapes: B batch, T queries, C keys and values, N query heads, G heads of keys and values (G divides N), H head
width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How scores are made, in this order.

    scale    factor of a query times a key; None: 1 / √H
    softcap  c of c · tanh(score / c) (Gemma 2's report, 2408.00118)
    slopes   (N) of ALiBi (2108.12409): a score loses its head's slope times the distance of query and key
    sinks    (N) a score per head that takes part in the softmax and has no value (2309.17453, GPT-OSS)
    """

    scale: float | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


PLAIN_SCORES = Scores()


def alibi_slopes(heads: int, first: int, count: int, device: torch.device) -> Tensor:
    """The slopes of `count` of all `heads`, from head `first` on, (count) fp32.

    Those of a power of two of heads are 2^(-8 i / heads), i from 1 on; further heads have every other slope
    of twice as many.
    """
    power = 1 << (heads.bit_length() - 1)
    places = torch.arange(first, first + count, device=device, dtype=torch.float32)
    exponents = torch.where(places < power, places + 1, places - power + 0.5)
    return torch.exp2(exponents * (-8 / power))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, scores: Scores, visible: Tensor | None) -> Tensor:
    """Attention whose scores are in memory: queries (B, T, N, H), keys and values (B, C, G, H) -> as queries.

    `visible` (B or 1, 1, T, C) is True where a query sees a key; None: queries are the last T of C tokens,
    each of which sees those up to itself.
    """
    tokens, groups = q.shape[1], k.shape[2]
    columns = torch.arange(k.shape[1], device=q.device)
    if visible is None:
        visible = columns <= columns[-tokens:, None]  # (T, C)
    by_group = q.transpose(1, 2).unflatten(1, (groups, -1)).flatten(2, 3)  # (B, G, N / G · T, H)
    found = (by_group @ k.permute(0, 2, 3, 1)).unflatten(2, (-1, tokens)).flatten(1, 2)  # (B, N, T, C)
    exact = torch.promote_types(q.dtype, torch.float32)
    found = found.to(exact) * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if scores.slopes is not None:
        own = torch.where(visible, columns, 0).amax(-1, keepdim=True)  # a token sees itself last
        found = found + scores.slopes[:, None, None] * (columns - own)
    found = found.masked_fill(~visible, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(exact)[:, None, None].expand(*found.shape[:3], 1)
        weights = torch.cat([found, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = found.softmax(-1)
    weights = F.dropout(weights, dropout).to(q.dtype).unflatten(1, (groups, -1)).flatten(2, 3)
    mixed = weights @ v.transpose(1, 2)  # (B, G, N / G · T, H)
    return mixed.unflatten(2, (-1, tokens)).flatten(1, 2).transpose(1, 2)
