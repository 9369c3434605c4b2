"""Text that the model writes while it is trained, for a person to look at."""

import torch

from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.zero.engine import ZeroEngine

_SAMPLING, _SEED = Sampling(temperature=0.8, top_k=50), 1234


def check_prompt(config: Config) -> None:
    """Raises ValueError for a --sample-prompt that the tokenizer has no ids for."""
    prompt = config.evaluation.sample_prompt
    if prompt is not None:
        try:
            build_tokenizer(config.tokenizer).encode(prompt)
        except ValueError as error:
            raise option_error("--sample-prompt", prompt, str(error)) from None


def sample_text(
    engine: ZeroEngine, tokenizer: Tokenizer, prompt: str, *, new_tokens: int, positions: int
) -> str:
    """`prompt` and what the model makes of it, up to `new_tokens` tokens; every rank must call it.

    Each rank runs equally many forwards, as gathers of sharded parameters need. `positions` is how many
    tokens the model can look at.
    """
    ids = tokenizer.encode(prompt)
    generator = generator_of(_SEED, ids, copy=0)
    for _ in range(new_tokens):
        window = torch.tensor([ids[-positions:]])  # (1, T)
        logits = engine.next_token_logits(window)[None]  # (1, V)
        ids.append(draw(logits, _SAMPLING, uniforms([generator])).item())
    if tokenizer.eod in ids:
        ids = ids[: ids.index(tokenizer.eod)]
    return tokenizer.decode(ids)
