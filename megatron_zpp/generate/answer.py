"""What a request of Megatron-LM's `PUT /api` asks for, and its answer: text, segments and logprobs."""

import secrets
from collections.abc import Sequence
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.generate.continuation import order_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.request import GenerateRequest
from megatron_zpp.generate.text import Continuation, Order, Stop
from megatron_zpp.generate.texts import segments
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer


def encode_prompts(request: GenerateRequest, model: GPT, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt. Raises ValueError if the tokenizer or the model cannot take the request."""
    positions = model.config.max_position_embeddings
    prompts = []
    for number, text in enumerate(request.prompts):
        try:
            ids = [tokenizer.eod] * request.add_BOS + tokenizer.encode(text)
        except ValueError as error:
            raise option_error(f"prompts[{number}]", _short(text), str(error)) from None
        if not ids:
            raise option_error(
                f"prompts[{number}]", _short(text), "has no tokens; an empty prompt needs add_BOS true"
            )
        if len(ids) + request.tokens_to_generate > positions:
            raise option_error(
                "tokens_to_generate",
                request.tokens_to_generate,
                f"prompts[{number}] has {len(ids)} tokens and the model {positions} positions: at most "
                f"{max(0, positions - len(ids))}",
            )
        prompts.append(ids)
    if request.stop_token is not None and request.stop_token >= tokenizer.vocab_size:
        raise option_error("stop_token", request.stop_token, f"must be below {tokenizer.vocab_size}")
    return prompts


def order_of(request: GenerateRequest, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[Order]:
    """The texts that a request asks for."""
    stop_token = tokenizer.eod if request.stop_token is None else request.stop_token
    return order_texts(
        prompts,
        new_tokens=request.tokens_to_generate,
        sampling=Sampling(request.temperature, request.top_k, request.top_p),
        seed=secrets.randbits(62) if request.random_seed is None else request.random_seed,
        stop=Stop(frozenset([stop_token]), request.stop_strings),
        score_prompts=request.logprobs and request.echo_prompts,
    )


def answer(request: GenerateRequest, tokenizer: Tokenizer, texts: Sequence[Continuation]) -> dict[str, Any]:
    """Return the answer to the client as JSON.

    `segments` have a string per token; with add_BOS the first is that of the end of document. `logprobs` are
    those of all tokens but the first; without an echo only of the new ones.
    """
    echoed = request.prompts if request.echo_prompts else [""] * len(texts)
    return {
        "text": [prompt + written.text for prompt, written in zip(echoed, texts, strict=True)],
        "segments": [
            [*(segments(tokenizer, written.prompt) if request.echo_prompts else []), *written.segments]
            for written in texts
        ],
        "logprobs": [
            [score.log_probability for score in (*written.prompt_scores, *written.scores)]
            for written in texts
        ]
        if request.logprobs
        else None,
    }


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:37]!r}…"
