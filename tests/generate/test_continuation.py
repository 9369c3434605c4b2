"""Texts that are continued; test_batch.py and tests/commands/test_sample.py have drawn ones, and stops."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_zpp.generate.continuation import Continuation, Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import POSITIONS, PROMPTS


def write(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], new_tokens: int = 12
) -> list[Continuation]:
    settings: dict[str, Any] = {"sampling": Sampling(0), "seed": 7, "batch_size": 8, "stop": Stop()}
    return list(continue_texts(model, tokenizer, prompts, new_tokens=new_tokens, **settings))


def test_beyond_the_positions_the_last_that_fit_are_seen(model: GPT, tokenizer: Tokenizer) -> None:
    """Also while another text of the batch is shorter than that, and for a prompt that is longer."""
    first, *others = (tokenizer.encode(prompt)[:18] for prompt in PROMPTS[:3])
    for text in write(model, tokenizer, [(first * 5)[: POSITIONS + 5], *others], POSITIONS):
        ids = list(text.prompt)
        for token in text.ids:
            assert token == model(torch.tensor([ids[-POSITIONS:]]))[0, -1].argmax()
            ids.append(token)
        assert len(text.ids) == POSITIONS


def test_no_prompt_begins_a_document(model: GPT, tokenizer: Tokenizer) -> None:
    empty, marked = (write(model, tokenizer, [ids])[0] for ids in ([], [tokenizer.eod]))
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
