"""Texts that are continued together: what transformers writes, and what each would be alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_zpp.generate.continuation import Continuation, Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import POSITIONS, PROMPTS

GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.0, top_k=100, top_p=0.95)


def write(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], new_tokens: int = 12, **more: Any
) -> list[Continuation]:
    settings = {"sampling": DRAWN, "seed": 7, "batch_size": 8, "stop": Stop(), **more}
    return list(continue_texts(model, tokenizer, prompts, new_tokens=new_tokens, **settings))


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    found = [tokenizer.encode(prompt)[:18] for prompt in PROMPTS]
    assert len({len(prompt) for prompt in found}) > 2
    return found


def test_a_text_does_not_depend_on_what_is_drawn_beside_it(
    model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    together = write(model, tokenizer, prompts)
    expected = [text.ids for text in together]
    for batch_size in (1, 3):
        assert [text.ids for text in write(model, tokenizer, prompts, batch_size=batch_size)] == expected
    assert [text.ids for text in write(model, tokenizer, prompts[::-1])] == expected[::-1]
    assert write(model, tokenizer, prompts, seed=8)[0].ids != together[0].ids


def test_copies_of_a_prompt_differ(model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    two = write(model, tokenizer, [prompts[0], prompts[1], prompts[0]])
    assert two[0].ids != two[2].ids
    assert two[2].ids == write(model, tokenizer, [prompts[0]] * 2)[1].ids


def test_beyond_the_positions_the_last_that_fit_are_seen(
    model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    """Also while another text of the batch is shorter than that, and for a prompt that is longer."""
    long = (prompts[0] * 5)[: POSITIONS + 5]
    batch = [long, prompts[1], prompts[2]]
    for text in write(model, tokenizer, batch, POSITIONS, sampling=GREEDY):
        ids = list(text.prompt)
        for token in text.ids:
            assert token == model(torch.tensor([ids[-POSITIONS:]]))[0, -1].argmax()
            ids.append(token)
        assert len(text.ids) == POSITIONS


def test_a_text_ends_before_what_stops_it(model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    free = write(model, tokenizer, prompts, sampling=GREEDY)
    text = free[0]
    by_id = write(model, tokenizer, prompts, sampling=GREEDY, stop=Stop(frozenset([text.ids[5]])))
    assert by_id[0].ids == text.ids[: text.ids.index(text.ids[5])]
    assert text.text.startswith(by_id[0].text)

    string = text.text[len(text.text) // 2 :][:2]
    by_string = write(model, tokenizer, prompts, sampling=GREEDY, stop=Stop(strings=("never", string)))
    for found, unstopped in zip(by_string, free, strict=True):
        assert found.text == unstopped.text.split(string)[0]
        assert found.ids == unstopped.ids[: len(found.ids)]


def test_no_prompt_begins_a_document(model: GPT, tokenizer: Tokenizer) -> None:
    empty, marked = (write(model, tokenizer, [ids], sampling=GREEDY)[0] for ids in ([], [tokenizer.eod]))
    assert empty.ids == marked.ids
    assert empty.text == tokenizer.decode(empty.ids)


def test_weights_that_are_no_numbers_are_refused(tokenizer: Tokenizer) -> None:
    from megatron_zpp.config.model import ModelConfig

    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8)
    model = GPT(config, tokenizer.vocab_size).initialize(1).eval()
    with torch.no_grad():
        model.head.norm.bias[3] = torch.nan
    with pytest.raises(ValueError, match="logits that are not finite"):
        write(model, tokenizer, [[1]])
