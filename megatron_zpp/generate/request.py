"""Requests to the server: the keys of Megatron-LM's `PUT /api`, and their limits."""

import difflib
import json
import typing
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.options import Options, fits, option, option_error

MOST_STOPS, LONGEST_STOP = 64, 256  # strings, characters: all are looked for after each token

# Keys of Megatron-LM that would change the text and are not supported, and their values without effect.
_UNSUPPORTED = {
    "beam_width": (None, "beam search is not available; omit it"),
    "length_penalty": (1, "belongs to beam search, which is not available; omit it"),
    "top_p_decay": (0, "top_p stays the same for all tokens; omit it"),
    "top_p_bound": (0, "top_p stays the same for all tokens; omit it"),
    "prevent_newline_after_colon": (False, "is not available; omit it"),
    "max_len": (None, "give tokens_to_generate"),
    "sentences": (None, "give prompts"),
}


def key(name: str, default: Any, help: str, **bounds: Any) -> Any:
    """A field whose errors name the key of the request."""
    return option(default, help, flag=name, **bounds)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Options):
    """request: one call of PUT /api"""

    prompts: tuple[str, ...] = key("prompts", ("",), "Texts to continue; empty ones are allowed.")
    tokens_to_generate: int = key("tokens_to_generate", 64, "0 only scores the prompts.", at_least=0)
    temperature: float = key("temperature", 1.0, "0 takes the likeliest.", at_least=0, at_most=100)
    top_k: int = key("top_k", 0, "0 draws among all.", at_least=0, at_most=1000)
    top_p: float = key("top_p", 0.0, "0 draws among all.", at_least=0, at_most=1)
    random_seed: int | None = key(
        "random_seed", None, "Default: another one each time.", at_least=0, below=2**63
    )
    stop_token: int | None = key("stop_token", None, "Default: the end of document.", at_least=0)
    stop: tuple[str, ...] = key(
        "stop", (), f"Texts end before any of these; {MOST_STOPS} of {LONGEST_STOP} characters at most."
    )
    stop_on_eol: bool = key("stop_on_eol", False, "Texts end before a newline.")
    stop_on_double_eol: bool = key("stop_on_double_eol", False, "Texts end before two newlines.")
    add_BOS: bool = key("add_BOS", False, "Begin a document: put its mark before each prompt.")
    logprobs: bool = key("logprobs", False, "Answer with the log-probability of each token but the first.")
    echo_prompts: bool = key("echo_prompts", True, "Texts and segments begin with the prompt's.")
    no_log: bool = key("no_log", False, "Say nothing of this request on the server's terminal.")

    def check(self) -> None:
        """Check rules over several keys, which are Megatron-LM's."""
        if not self.prompts:
            raise option_error("prompts", "[]", "is empty; give at least one text")
        if "" in self.prompts and not self.add_BOS:
            raise option_error("prompts", _shown(self.prompts), "an empty prompt needs add_BOS true")
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise option_error(
                "tokens_to_generate", 0, "needs logprobs true; else there is nothing to answer"
            )
        if len(self.stop) > MOST_STOPS:
            raise option_error("stop", f"(list of {len(self.stop)})", f"at most {MOST_STOPS} strings")
        for number, text in enumerate(self.stop):
            if len(text) > LONGEST_STOP:
                fix = f"has {len(text)} characters; at most {LONGEST_STOP}"
                raise option_error(f"stop[{number}]", _shown(text), fix)
        if self.top_k and self.top_p:
            raise option_error("top_p", self.top_p, f"contradicts top_k {self.top_k}; give one")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All strings that end a text."""
        return self.stop + ("\n",) * self.stop_on_eol + ("\n\n",) * self.stop_on_double_eol


def parse_request(body: bytes) -> GenerateRequest:
    """Return the request. Raises ValueError, in one line with the key, its value and what would be right."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            'the request is not a JSON object such as {"prompts": ["…"], "tokens_to_generate": 64}'
        )
    hints = typing.get_type_hints(GenerateRequest)
    given: dict[str, Any] = {}
    for name, value in content.items():
        if name in _UNSUPPORTED:
            neutral, fix = _UNSUPPORTED[name]
            if value != neutral:
                raise option_error(name, _shown(value), fix)
            continue
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            known = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(hints)}"
            raise option_error(name, _shown(value), f"no such key; {known}")
        value = tuple(value) if isinstance(value, list) else value
        if not fits(value, hints[name]):
            raise option_error(name, _shown(value), f"must be {_words(hints[name])}")
        given[name] = value
    if "prompts" not in given:
        raise option_error("prompts", "(not given)", "give a list of texts")
    return GenerateRequest(**given)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _words(hint: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        tuple[str, ...]: "a list of strings",
    }
    (kind,) = (
        (part for part in typing.get_args(hint) if part is not type(None)) if hint not in names else (hint,)
    )
    return names[kind]
