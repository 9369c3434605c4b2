"""The next token of each text of a batch.

Shapes: B texts, V vocabulary, K candidates.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature 0 takes the likeliest; `top_k` 0 and `top_p` 0 or 1 draw among all.

    With both, the likeliest `top_k` come first and `top_p` is a share of their probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0


def generator_of(seed: int, prompt: Sequence[int], copy: int) -> torch.Generator:
    """The random numbers of the `copy`th text from a prompt; they depend on these three arguments only.

    So a text does not depend on the texts that are drawn at the same time.
    """
    key = f"{seed}/{copy}/{','.join(map(str, prompt))}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)  # torch's seeds are signed


def uniforms(generators: Sequence[torch.Generator]) -> Tensor:
    """One number in [0, 1) of each generator: (B) fp64 on the CPU."""
    return torch.cat([torch.rand(1, generator=each, dtype=torch.float64) for each in generators])


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Ids (B) from logits (B, V) and one uniform number each (B): the inverse of the cumulative distribution.

    Sums are fp64: in fp32 the last of a hundred thousand probabilities would be lost.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    values, ids = logits.double(), None  # (B, K), likeliest first where it matters; None: ids are indices
    if 0 < sampling.top_k < values.shape[-1]:
        values, ids = values.topk(sampling.top_k)
    elif 0 < sampling.top_p < 1:
        values, ids = values.sort(descending=True)
    largest = values.max(-1, keepdim=True).values  # however low the temperature, its quotient is 0
    probabilities = torch.softmax((values - largest) / sampling.temperature, dim=-1)
    if 0 < sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    sums = probabilities.cumsum(-1)
    place = torch.searchsorted(sums, uniform.to(sums)[:, None] * sums[:, -1:], right=True)
    last = (probabilities > 0).cumsum(-1).argmax(-1, keepdim=True)  # where rounding would lead beyond it
    place = torch.minimum(place, last)
    return (place if ids is None else ids.gather(-1, place))[:, 0]
