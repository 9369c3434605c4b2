"""Continues texts, several at once, token by token."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.generate.cached import Cache, next_logits
from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms
from megatron_zpp.generate.texts import text_after
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Stop:
    """What ends a text without being part of it: an id, or a string in the generated text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass
class Continuation:
    """The text generated after `prompt`, and the log-probability of each of its ids."""

    prompt: list[int]
    ids: list[int]
    log_probabilities: list[float]
    text: str


@dataclass
class _Row:
    """A text that is being written."""

    result: Continuation
    generator: torch.Generator

    @property
    def ids(self) -> list[int]:
        return self.result.prompt + self.result.ids


def continue_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Stop,
    batch_size: int,
    before_token: Callable[[], None] = lambda: None,
) -> Iterator[Continuation]:
    """Up to `new_tokens` ids after each prompt, `batch_size` texts at a time, in the prompts' order.

    An empty prompt begins a document. Of a text longer than the model's positions the model sees the last
    tokens that fit, without a cache. The drawn ids depend only on the seed, the prompt and how often this
    prompt came before. `before_token` may end the generation by raising.
    """
    copies: Counter[tuple[int, ...]] = Counter()
    rows = []
    for prompt in prompts:
        key = tuple(prompt)
        result = Continuation(list(prompt) or [tokenizer.eod], [], [], "")
        rows.append(_Row(result, generator_of(seed, key, copies[key])))
        copies[key] += 1
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        _write(model, tokenizer, batch, new_tokens, sampling, stop, before_token)
        yield from (row.result for row in batch)


@torch.inference_mode()
def _write(
    model: GPT,
    tokenizer: Tokenizer,
    rows: list[_Row],
    new_tokens: int,
    sampling: Sampling,
    stop: Stop,
    before_token: Callable[[], None],
) -> None:
    """Fill in the rows' results."""
    all_rows, cache = rows, None
    for written in range(new_tokens):
        before_token()
        logits, cache = _next(model, rows, cache, new_tokens - written)  # (B, V)
        if not torch.isfinite(logits).all():
            raise ValueError("the model gives logits that are not finite; its weights cannot be used")
        chosen = draw(logits, sampling, uniforms([row.generator for row in rows]))
        scores = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])[:, 0]
        going = [
            index
            for index, (row, token, score) in enumerate(
                zip(rows, chosen.tolist(), scores.tolist(), strict=True)
            )
            if not _take(row.result, token, score, stop, tokenizer)
        ]
        if not going:
            break
        if len(going) < len(rows):
            rows = [rows[index] for index in going]
            cache.keep(going)
    for row in all_rows:
        if not stop.strings or not row.result.text:
            row.result.text = text_after(tokenizer, row.result.prompt, row.result.ids)


def _next(model: GPT, rows: list[_Row], cache: Cache | None, left: int) -> tuple[torch.Tensor, Cache]:
    """Return logits (B, V) after each row, and its cache, which is a new one if the last is full."""
    positions, device = model.config.max_position_embeddings, model.embedding.tokens.weight.device
    if cache is not None and cache.length < cache.columns:
        tokens = torch.tensor([row.result.ids[-1:] for row in rows], device=device)  # (B, 1)
        return next_logits(model, tokens, cache), cache
    windows = [row.ids[-positions:] for row in rows]
    longest = max(map(len, windows))
    padding = [longest - len(window) for window in windows]
    cache = Cache(model, padding, min(positions, longest + left - 1))
    filled = [[0] * empty + window for empty, window in zip(padding, windows, strict=True)]
    return next_logits(model, torch.tensor(filled, device=device), cache), cache


def _take(result: Continuation, token: int, score: float, stop: Stop, tokenizer: Tokenizer) -> bool:
    """Add an id to a text; return whether the text has ended."""
    if token in stop.ids:
        return True
    result.ids.append(token)
    result.log_probabilities.append(score)
    if not stop.strings:
        return False
    result.text = text_after(tokenizer, result.prompt, result.ids)
    places = [place for string in stop.strings if (place := result.text.find(string)) >= 0]
    if not places:
        return False
    result.text = result.text[: min(places)]
    while result.ids and len(text_after(tokenizer, result.prompt, result.ids[:-1])) >= len(result.text):
        del result.ids[-1], result.log_probabilities[-1]
    return True
