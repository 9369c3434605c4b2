"""Requests of PUT /api: what is understood, and how the rest is refused."""

import json

import pytest

from megatron_zpp.generate.answer import encode_prompts
from megatron_zpp.generate.request import GenerateRequest, parse_request
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

GOOD = {"prompts": ["a"]}


def parse(**keys: object) -> GenerateRequest:
    return parse_request(json.dumps(GOOD | keys).encode())


def test_defaults_are_megatrons() -> None:
    request = parse()
    assert (request.tokens_to_generate, request.temperature) == (64, 1.0)
    assert (request.top_k, request.top_p) == (0, 0.0)
    assert not request.add_BOS
    assert not request.logprobs
    assert request.random_seed is None
    assert request.stop_strings == ()
    assert parse(stop_on_eol=True, stop=["x"], stop_on_double_eol=True).stop_strings == ("x", "\n", "\n\n")


def test_what_asks_for_nothing_is_taken() -> None:
    """Clients of Megatron-LM send keys with the values that they would have anyway."""
    neutral = {"beam_width": None, "length_penalty": 1, "top_p_decay": 0.0, "top_p_bound": 0}
    assert parse(**neutral, no_log=True).prompts == ("a",)


REFUSED = [
    ({"prompts": []}, "prompts []: is empty; give at least one text"),
    ({"prompts": "a"}, 'prompts "a": must be a list of strings'),
    ({"prompts": ["a", 1]}, 'prompts ["a", 1]: must be a list of strings'),
    ({"prompts": [""]}, 'prompts [""]: an empty prompt needs add_BOS true'),
    ({"tokens_to_generate": -1}, "tokens_to_generate -1: must be at least 0"),
    ({"tokens_to_generate": 2.5}, "tokens_to_generate 2.5: must be a whole number"),
    ({"tokens_to_generate": True}, "tokens_to_generate true: must be a whole number"),
    ({"tokens_to_generate": 0}, "tokens_to_generate 0: needs logprobs true"),
    ({"temperature": -0.5}, "temperature -0.5: must be at least 0"),
    ({"temperature": 101}, "temperature 101: must be at most 100"),
    ({"temperature": "hot"}, 'temperature "hot": must be a number'),
    ({"temperature": float("nan")}, "temperature nan: must be a finite number"),
    ({"top_k": 1001}, "top_k 1001: must be at most 1000"),
    ({"top_p": 1.5}, "top_p 1.5: must be at most 1"),
    ({"top_k": 3, "top_p": 0.5}, "top_p 0.5: contradicts top_k 3; give one"),
    ({"random_seed": -1}, "random_seed -1: must be at least 0"),
    ({"stop": ["x"] * 65}, "stop (list of 65): at most 64 strings"),
    ({"stop": ["a", "x" * 257]}, "xxx…: has 257 characters; at most 256"),
    ({"stop": [""]}, "stop '': must not be empty"),
    ({"add_BOS": 1}, "add_BOS 1: must be true or false"),
    ({"beam_width": 4}, "beam_width 4: beam search is not available; omit it"),
    ({"top_p_decay": 0.5}, "top_p_decay 0.5: top_p stays the same for all tokens"),
    ({"max_len": 5}, "max_len 5: give tokens_to_generate"),
    ({"topk": 5}, "topk 5: no such key; did you mean top_k?"),
    ({"zzz": "x" * 999}, 'xxx…: no such key; the keys are prompts'),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_one_line_names_key_value_and_what_is_right(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse(**keys)
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'"a"', b"\xff", b"[" * 100_000, b'{"prompts": '])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the request is not "):
        parse_request(body)


def test_no_prompts() -> None:
    with pytest.raises(ValueError, match=r"^prompts \(not given\): give a list"):
        parse_request(b"{}")


def test_what_the_model_has_no_place_for(model: GPT, tokenizer: Tokenizer) -> None:
    short = len(tokenizer.encode("a b c"))
    room = model.config.max_position_embeddings - short
    assert encode_prompts(parse(prompts=["a b c"], tokens_to_generate=room), model, tokenizer)
    with pytest.raises(ValueError, match=rf"^tokens_to_generate {room + 1}: prompts.1. has .* most {room}$"):
        encode_prompts(parse(prompts=["a", "a b c"], tokens_to_generate=room + 1), model, tokenizer)
    with pytest.raises(ValueError, match=rf"^stop_token 99999: must be below {tokenizer.vocab_size}$"):
        encode_prompts(parse(stop_token=99999, tokens_to_generate=1), model, tokenizer)
