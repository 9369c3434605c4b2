"""Rows of a vocabulary beyond the tokenizer's entries take part in the loss, and are never written."""

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.continuation import Continuation, write_batch
from megatron_zpp.generate.draw import Sampling, generator_of
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer

ENTRIES, ROWS = 20, 27
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 12}
CONFIG = ModelConfig(
    **SHAPE, padded_vocab_size=ROWS, init_method_std=0.3, attention_dropout=0.0, hidden_dropout=0.0
)


@pytest.fixture
def model() -> GPT:
    """Its likeliest tokens have no text."""
    model = GPT(CONFIG, ENTRIES).initialize(1).eval()
    with torch.no_grad():
        model.head.norm.bias.fill_(1.0)
        model.embedding.tokens.weight[ENTRIES:ROWS] = 0.5
    return model


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0), Sampling(1.0, 5), Sampling(1.0, 0, 0.9)])
def test_drawn_tokens_have_text(model: GPT, sampling: Sampling) -> None:
    text = Continuation((3, 1), NullTokenizer(ENTRIES - 1), generator_of(1, (3, 1), 0), 8)
    write_batch(model, [text], sampling)
    logits = model(torch.tensor([[3, 1, *text.ids]]))[0, 1:-1]  # (8, V)
    assert logits.shape == (8, ROWS)
    assert torch.softmax(logits, -1)[:, ENTRIES:].sum(-1).min() > 0.5
    assert max(text.ids) < ENTRIES
    if sampling.temperature == 0:
        assert text.ids == logits[:, :ENTRIES].argmax(-1).tolist()


def test_the_loss_and_its_gradient_are_those_of_all_rows(model: GPT) -> None:
    tokens = torch.randint(ENTRIES, (2, 13), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weight = model.embedding.tokens.weight
    model(inputs, targets).backward()
    found, weight.grad = weight.grad, None
    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(found, weight.grad)
    assert found[ENTRIES:ROWS].abs().amin() > 0
    assert not found[ROWS:].any()
