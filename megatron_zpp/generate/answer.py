"""Answers a request: Megatron-LM's text, segments and logprobs."""

import secrets
from collections.abc import Callable
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.generate.continuation import Continuation, Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.request import GenerateRequest
from megatron_zpp.generate.scoring import Passage, score_passages
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


def answer(
    request: GenerateRequest,
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    *,
    batch_size: int,
    before_token: Callable[[], None],
) -> dict[str, Any]:
    """Return the answer to the client as JSON. `before_token` may stop generation by raising."""
    stop_token = tokenizer.eod if request.stop_token is None else request.stop_token
    found = continue_texts(
        model,
        tokenizer,
        prompts,
        new_tokens=request.tokens_to_generate,
        sampling=Sampling(request.temperature, request.top_k, request.top_p),
        seed=secrets.randbits(62) if request.random_seed is None else request.random_seed,
        stop=Stop(frozenset([stop_token]), request.stop_strings),
        batch_size=batch_size,
        before_token=before_token,
    )
    texts = list(found)
    echoed = request.prompts if request.echo_prompts else [""] * len(texts)
    return {
        "text": [prompt + written.text for prompt, written in zip(echoed, texts, strict=True)],
        "segments": [_segments(tokenizer, written, request) for written in texts],
        "logprobs": _logprobs(model, texts, request, batch_size, before_token) if request.logprobs else None,
    }


def _segments(tokenizer: Tokenizer, written: Continuation, request: GenerateRequest) -> list[str]:
    """One string per token; with add_BOS the first is that of the end of document."""
    ids = written.prompt + written.ids
    found = segments(tokenizer, ids)
    return found if request.echo_prompts else found[len(written.prompt) :]


def _logprobs(
    model: GPT,
    texts: list[Continuation],
    request: GenerateRequest,
    batch_size: int,
    before_token: Callable[[], None],
) -> list[list[float]]:
    """Return log-probabilities of all tokens but the first; without an echo only of the new ones."""
    if not request.echo_prompts:
        return [written.log_probabilities for written in texts]
    longer = [written.prompt for written in texts if len(written.prompt) > 1]
    passages = [Passage(prompt, len(prompt) - 1) for prompt in longer]
    scores = score_passages(model, passages, batch_size, before_token)
    return [
        (next(scores).log_probabilities if len(written.prompt) > 1 else []) + written.log_probabilities
        for written in texts
    ]


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:37]!r}…"
