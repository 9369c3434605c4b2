"""Continues given texts, several at once, in their order."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_zpp.generate.batch import Batch
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.text import Continuation, Order, Stop
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer


def order_texts(
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Stop,
    alternatives: int = 0,
    score_prompts: bool = False,
) -> list[Order]:
    """An order of one text for each prompt. Equal prompts get different texts."""
    copies: Counter[tuple[int, ...]] = Counter()
    orders = []
    for prompt in map(tuple, prompts):
        scored = score_prompts and len(prompt) > 1
        orders.append(Order(prompt, new_tokens, sampling, seed, copies[prompt], stop, alternatives, scored))
        copies[prompt] += 1
    return orders


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
    started = [list(prompt) or [tokenizer.eod] for prompt in prompts]
    orders = order_texts(started, new_tokens=new_tokens, sampling=sampling, seed=seed, stop=stop)
    texts = [Continuation(order, tokenizer) for order in orders]
    batch, waiting = Batch(model, batch_size), iter(texts)
    for text in texts:
        while not text.ended:
            while batch.free and (new := next(waiting, None)) is not None:
                if not new.ended:
                    batch.add(new)
            batch.step()
        if text.failure:
            raise ValueError(text.failure)
        yield text
