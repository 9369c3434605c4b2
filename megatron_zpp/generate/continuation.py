"""Continues given texts, several at once, in their order."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_zpp.generate.batch import Batch
from megatron_zpp.generate.draw import Sampling, generator_of
from megatron_zpp.generate.text import Continuation, Stop
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer


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
    batch = Batch(model, batch_size, sampling)
    waiting = iter([text for text in texts if not text.ended])
    for text in texts:
        while not text.ended:
            while batch.free and (new := next(waiting, None)) is not None:
                batch.add(new)
            batch.step()
        yield text
