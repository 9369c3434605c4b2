"""Requests of OpenAI's `POST /v1/completions`: the fields that are obeyed, and those that are refused."""

import dataclasses
import secrets
from dataclasses import dataclass

from megatron_zpp.config.options import Options, option_error
from megatron_zpp.generate.continuation import order_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.json_request import check_stops, fields_of, key, parse_object, shown
from megatron_zpp.generate.text import Order, Stop
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

Ids = tuple[int, ...]

# Fields of OpenAI that would change the text and are not supported, and their values without effect.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "text is only written at the end of a prompt; omit it"),
    "presence_penalty": ((0,), "penalties are not available; omit it"),
    "frequency_penalty": ((0,), "penalties are not available; omit it"),
    "logit_bias": (({},), "is not available; omit it"),
    "messages": ((), "a pretrained model has no chat format; give prompt"),
}
_WORDS = {str | tuple[str | Ids, ...] | Ids: "a string, a list of strings, a list of ids or a list of those"}
_WORDS |= {str | tuple[str, ...]: "a string or a list of strings"}


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Options):
    """request: one call of POST /v1/completions"""

    model: str | None = key("model", None, "Default: the one that is served.")
    prompt: str | tuple[str | Ids, ...] | Ids = key("prompt", "", "Text, or ids; empty: a new document.")
    max_tokens: int = key("max_tokens", 16, "0 only scores the prompt.", at_least=0)
    temperature: float = key("temperature", 1.0, "0 takes the likeliest.", at_least=0, at_most=2)
    top_p: float = key("top_p", 1.0, "1 draws among all.", above=0, at_most=1)
    top_k: int = key("top_k", 0, "0 draws among all; not OpenAI's.", at_least=0, at_most=1000)
    n: int = key("n", 1, "Texts for each prompt.", at_least=1, at_most=128)
    seed: int | None = key("seed", None, "Default: another one each time.", at_least=-(2**63), below=2**63)
    stop: str | tuple[str, ...] = key("stop", (), "Texts end before any of these.")
    logprobs: int | None = key("logprobs", None, "Likeliest tokens shown.", at_least=0, at_most=5)
    echo: bool = key("echo", False, "Texts begin with the prompt.")
    stream: bool = key("stream", False, "Send tokens as they are written.")
    stream_options: bool = key("stream_options", False, "End the stream with the counts of tokens.")
    user: str | None = key("user", None, "Without effect.")

    def check(self) -> None:
        """Check rules over several fields."""
        if self.prompt == ():
            raise option_error("prompt", "[]", "is empty; give text, or an empty string for a new document")
        kinds = {type(prompt) for prompt in self.prompts}
        if len(kinds) > 1:
            raise option_error("prompt", shown(self.prompt), "mixes text and ids; send one request for each")
        if self.max_tokens == 0 and not self.echo:
            raise option_error("max_tokens", 0, "needs echo true; else there is nothing to answer")
        check_stops(self.stops)

    @property
    def prompts(self) -> tuple[str | Ids, ...]:
        """All prompts, each text or ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        ids = tuple(part for part in self.prompt if isinstance(part, int))
        return (ids,) if ids else tuple(part for part in self.prompt if not isinstance(part, int))

    @property
    def stops(self) -> tuple[str, ...]:
        """All strings that end a text."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


# Names of fields that a client may know, and with which the message of a refusal can begin.
FIELDS = frozenset(
    [*(field.name for field in dataclasses.fields(CompletionRequest)), *_UNSUPPORTED, "best_of"]
)


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the request. Raises ValueError, in one line that begins with the name of the field."""
    content = parse_object(body, '{"prompt": "…", "max_tokens": 16}')
    content = {name: value for name, value in content.items() if value is not None}  # clients send all fields
    if "stream_options" in content:
        content["stream_options"] = _includes_usage(content["stream_options"], content.get("stream"))
    copies = content.get("n", 1)
    unsupported = _UNSUPPORTED | {"best_of": ((copies,), "all texts are returned; give n")}
    return CompletionRequest(**fields_of(content, CompletionRequest, unsupported, _WORDS))


def _includes_usage(options: object, streams: object) -> bool:
    """Return the value of include_usage, the only option that is known."""
    usage = options.get("include_usage", False) if isinstance(options, dict) else None
    if not isinstance(options, dict) or options.keys() - {"include_usage"} or not isinstance(usage, bool):
        raise option_error("stream_options", shown(options), 'must be {"include_usage": true or false}')
    if not streams:
        raise option_error("stream_options", shown(options), "needs stream true")
    return usage


def prompts_of(request: CompletionRequest, model: GPT, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt; none begins a document. Raises ValueError that begins with the field's name."""
    found = []
    for number, prompt in enumerate(request.prompts):
        name = f"prompt[{number}]" if len(request.prompts) > 1 else "prompt"
        try:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except ValueError as error:
            raise option_error(name, shown(prompt), str(error)) from None
        if wrong := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
            raise option_error(name, shown(wrong[0]), f"ids are from 0 to {tokenizer.vocab_size - 1}")
        positions, length = model.config.max_position_embeddings, max(len(ids), 1)
        if length > positions:
            raise option_error(name, f"({length} tokens)", f"the model has {positions} positions")
        if length + request.max_tokens > positions:
            fix = f"{name} has {length} tokens and the model {positions} positions: at most"
            raise option_error("max_tokens", request.max_tokens, f"{fix} {positions - length}")
        found.append(ids)
    return found


def orders_of(request: CompletionRequest, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[Order]:
    """The texts that are asked for: `n` for each prompt, side by side."""
    seed = secrets.randbits(62) if request.seed is None else request.seed
    return order_texts(
        [prompt or [tokenizer.eod] for prompt in prompts for _ in range(request.n)],
        new_tokens=request.max_tokens,
        sampling=Sampling(request.temperature, request.top_k, request.top_p),
        seed=seed,
        stop=Stop(frozenset([tokenizer.eod]), request.stops),
        alternatives=request.logprobs or 0,
        score_prompts=request.echo and request.logprobs is not None,
    )
