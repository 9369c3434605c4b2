"""Requests of POST /v1/completions: what is understood, and how the rest is refused."""

import json

import pytest

from megatron_zpp.generate.completion_request import CompletionRequest, parse_completion


def parse(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps(fields).encode())


def test_defaults_are_openais() -> None:
    request = parse()
    assert (request.prompts, request.max_tokens, request.n) == (("",), 16, 1)
    assert (request.temperature, request.top_p, request.stops) == (1.0, 1.0, ())
    assert (request.echo, request.stream, request.logprobs) == (False, False, None)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    """Clients send all fields, most with null."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": "", "best_of": 1}
    assert parse(prompt="a", **neutral, user="me").prompts == ("a",)
    assert parse(**dict.fromkeys([*neutral, "stop", "n", "seed", "stream_options", "user"])).stops == ()
    assert parse(n=2, best_of=2).n == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([3, 4], ((3, 4),)), ([[3], [4, 5]], ((3,), (4, 5)))],
)
def test_forms_of_a_prompt(prompt: object, expected: object) -> None:
    assert parse(prompt=prompt).prompts == expected


REFUSED = [
    ({"prompt": []}, "prompt []: is empty"),
    ({"prompt": 3}, "prompt 3: must be a string, a list of strings, a list of ids or a list of those"),
    ({"prompt": ["a", [1]]}, "mixes text and ids; send one request for each"),
    ({"prompt": [1, "a"]}, 'prompt [1, "a"]: must be a string'),
    ({"max_tokens": -1}, "max_tokens -1: must be at least 0"),
    ({"max_tokens": 0}, "max_tokens 0: needs echo true"),
    ({"temperature": 2.5}, "temperature 2.5: must be at most 2"),
    ({"top_p": 0}, "top_p 0: must be above 0"),
    ({"n": 0}, "n 0: must be at least 1"),
    ({"n": True}, "n true: must be a whole number"),
    ({"logprobs": 6}, "logprobs 6: must be at most 5"),
    ({"stop": 3}, "stop 3: must be a string or a list of strings"),
    ({"stop": ""}, "stop '': must not be empty"),
    ({"stop": ["x"] * 65}, "stop (list of 65): at most 64 strings"),
    ({"stop": "x" * 257}, "has 257 characters; at most 256"),
    ({"suffix": "end"}, 'suffix "end": text is only written at the end of a prompt; omit it'),
    ({"presence_penalty": 0.5}, "presence_penalty 0.5: penalties are not available; omit it"),
    ({"logit_bias": {"5": -100}}, 'logit_bias {"5": -100}: is not available; omit it'),
    ({"best_of": 4, "n": 2}, "best_of 4: all texts are returned; give n"),
    ({"messages": []}, "messages []: a pretrained model has no chat format; give prompt"),
    ({"stream_options": {"include_usage": True}}, "needs stream true"),
    ({"stream": True, "stream_options": {"x": 1}}, 'stream_options {"x": 1}: must be {"include_usage"'),
    ({"max_token": 5}, "max_token 5: no such key; did you mean max_tokens?"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_one_line_names_field_value_and_what_is_right(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse(**fields)
    assert said in str(refused.value)
    assert str(refused.value).startswith(next(reversed(fields)) if "best_of" not in fields else "best_of")
    assert len(str(refused.value).splitlines()) == 1
