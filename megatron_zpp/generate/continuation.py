"""Continues given texts, a batch at a time, in their order.

Shapes: R texts of a forward pass, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron_zpp.generate.cached import Cache, decode, logits_of, prefill
from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

_CONTEXT = 8  # ids of the prompt that may change how the first id is decoded


@dataclass(frozen=True)
class Stop:
    """What ends a text without being part of it: an id, or a string in the generated text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(eq=False)
class Continuation:
    """Up to `new_tokens` ids after `prompt`, which has one id or more.

    `ids` includes the tokens that completed a stop string.
    """

    prompt: Sequence[int]
    tokenizer: Tokenizer
    generator: torch.Generator
    new_tokens: int
    stop: Stop = Stop()
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = not self.new_tokens

    @property
    def text(self) -> str:
        """What the ids add to the text of the prompt, up to the first stop string."""
        whole = text_after(self.tokenizer, self.prompt, self.ids)
        return whole[: self._end(whole)]

    def take(self, token: int) -> None:
        """Add an id, unless it ends the text."""
        if token in self.stop.ids:
            self.ended = True
            return
        self.ids.append(token)
        self.ended = len(self.ids) == self.new_tokens
        if self.stop.strings:
            whole = text_after(self.tokenizer, self.prompt, self.ids)
            self.ended |= self._end(whole) < len(whole)

    def _end(self, whole: str) -> int:
        places = [whole.find(string) for string in self.stop.strings if string]
        return min((place for place in places if place >= 0), default=len(whole))


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of the ids before them; ends of documents count as a beginning.

    A tokenizer may decode an id differently at the beginning of a text.
    """
    context = list(before[-_CONTEXT:])
    while tokenizer.eod in context:
        del context[: context.index(tokenizer.eod) + 1]
    known = tokenizer.decode(context)
    text = tokenizer.decode([*context, *ids])
    return text[len(known) :] if text.startswith(known) else tokenizer.decode(ids)


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
) -> Iterator[Continuation]:
    """Up to `new_tokens` ids after each prompt, `batch_size` texts at a time, in the prompts' order.

    An empty prompt begins a document. Of a text longer than the model's positions the model sees the last
    tokens that fit, without a cache. The drawn ids depend only on the seed, the prompt and how often this
    prompt came before. Raises ValueError if the model's logits are not finite.
    """
    copies: Counter[tuple[int, ...]] = Counter()
    texts = []
    for prompt in prompts:
        ids = tuple(prompt) or (tokenizer.eod,)
        generator = generator_of(seed, ids, copies[ids])
        copies[ids] += 1
        texts.append(Continuation(ids, tokenizer, generator, new_tokens, stop))
    for first in range(0, len(texts), batch_size):
        batch = texts[first : first + batch_size]
        write_batch(model, batch, sampling)
        yield from batch


@torch.inference_mode()
def write_batch(model: GPT, texts: Sequence[Continuation], sampling: Sampling) -> None:
    """Give each text tokens until all have ended. Raises ValueError if the model's logits are not finite."""
    positions = model.config.max_position_embeddings
    # Each token's position changes with every new one, or how it is rotated: the cache is of no use.
    stale = positions, model.config.longrope_limit
    running = [text for text in texts if not text.ended]
    cache = None
    while running:
        if cache is None or any(length in stale for length in cache.lengths):
            most = max(len(text.prompt) + text.new_tokens for text in running)
            cache = Cache(model, len(running), min(most, positions))
            windows = [[*text.prompt, *text.ids][-positions:] for text in running]
            x = prefill(model, cache, windows)[range(len(windows)), [len(each) - 1 for each in windows]]
        else:
            x = decode(model, cache, [text.ids[-1] for text in running])
        logits = logits_of(model, x)  # (R, V)
        if not torch.isfinite(logits).all():
            raise ValueError("the model gives logits that are not finite; its weights cannot be used")
        written = logits[:, : model.entries]  # the other rows of a vocabulary have no text
        tokens = draw(written, sampling, uniforms([text.generator for text in running]))
        for text, token in zip(running, tokens.tolist(), strict=True):
            text.take(token)
        rows = [row for row, text in enumerate(running) if not text.ended]
        if len(rows) < len(running):
            running = [running[row] for row in rows]
            cache.keep(rows)
