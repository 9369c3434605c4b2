"""Requests to the server: the keys of Megatron-LM's `PUT /api`, and their limits."""

from dataclasses import dataclass

from megatron_zpp.config.options import Options, option_error
from megatron_zpp.generate.json_request import (
    LONGEST_STOP,
    MOST_STOPS,
    check_stops,
    fields_of,
    key,
    parse_object,
    shown,
)

# Keys of Megatron-LM that would change the text and are not supported, and their values without effect.
_UNSUPPORTED = {
    "beam_width": ((None,), "beam search is not available; omit it"),
    "length_penalty": ((1,), "belongs to beam search, which is not available; omit it"),
    "top_p_decay": ((0,), "top_p stays the same for all tokens; omit it"),
    "top_p_bound": ((0,), "top_p stays the same for all tokens; omit it"),
    "prevent_newline_after_colon": ((False,), "is not available; omit it"),
    "max_len": ((None,), "give tokens_to_generate"),
    "sentences": ((None,), "give prompts"),
}


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
            raise option_error("prompts", shown(self.prompts), "an empty prompt needs add_BOS true")
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise option_error(
                "tokens_to_generate", 0, "needs logprobs true; else there is nothing to answer"
            )
        check_stops(self.stop)
        if self.top_k and self.top_p:
            raise option_error("top_p", self.top_p, f"contradicts top_k {self.top_k}; give one")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All strings that end a text."""
        return self.stop + ("\n",) * self.stop_on_eol + ("\n\n",) * self.stop_on_double_eol


def parse_request(body: bytes) -> GenerateRequest:
    """Return the request. Raises ValueError, in one line with the key, its value and what would be right."""
    content = parse_object(body, '{"prompts": ["…"], "tokens_to_generate": 64}')
    given = fields_of(content, GenerateRequest, _UNSUPPORTED, {})
    if "prompts" not in given:
        raise option_error("prompts", "(not given)", "give a list of texts")
    return GenerateRequest(**given)
