"""What a text of a batch is does not depend on the texts beside it, which end at other times."""

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.continuation import Continuation, write_batch
from megatron_zpp.generate.draw import Sampling, generator_of
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer

POSITIONS, IDS = 96, 50
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": POSITIONS}


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.7, 5, 0.9)])
def test_a_text_is_what_it_is_alone_whenever_others_end(sampling: Sampling) -> None:
    """Prompts and texts of unlike lengths; some outgrow the positions."""
    model = GPT(ModelConfig(**SHAPE, init_method_std=0.3), IDS + 1).initialize(1).eval()
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(IDS, (1 + n * 11 % 40,), generator=drawn).tolist() for n in range(12)]

    def texts() -> list[Continuation]:
        return [
            Continuation(prompt, NullTokenizer(IDS), generator_of(n, prompt, 0), 1 + n * 29 % 71)
            for n, prompt in enumerate(prompts)
        ]

    alone, together = texts(), texts()
    assert max(len(text.prompt) + text.new_tokens for text in together) > POSITIONS
    for text in alone:
        write_batch(model, [text], sampling)
    write_batch(model, together, sampling)
    assert all(text.ended for text in together)
    assert [text.ids for text in together] == [text.ids for text in alone]
