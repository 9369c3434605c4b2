"""Text that the model writes during training, for a person to read."""

from collections.abc import Callable
from functools import partial

import torch

from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.zero.engine import ZeroEngine

_SAMPLING, _SEED = Sampling(temperature=0.8, top_k=50), 1234
_NEW_TOKENS = 64


def text_writer(
    engine: ZeroEngine, prompt: str, tokenizer: TokenizerConfig, positions: int
) -> Callable[[], str]:
    """`sample_text` with all its arguments."""
    return partial(
        sample_text,
        engine,
        build_tokenizer(tokenizer),
        prompt,
        positions=positions,
        fills_window=engine.share.group is not None,
    )


def sample_text(
    engine: ZeroEngine,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    positions: int,
    fills_window: bool = False,
) -> str:
    """`prompt` and the model's continuation of up to 64 tokens; every rank must call it.

    All ranks run the same number of forwards, because each forward gathers sharded parameters. `positions`
    is the number of tokens that the model can attend to. `fills_window`: a forward must have as many.
    """
    ids = tokenizer.encode(prompt)
    generator = generator_of(_SEED, ids, copy=0)
    for _ in range(_NEW_TOKENS):
        window = ids[-positions:]
        padding = (
            [0] * (positions - len(window)) if fills_window else []
        )  # no token attends to what follows it
        tokens = torch.tensor([window + padding])  # (1, T)
        logits = engine.next_token_logits(tokens, after=len(window) - 1)[None]  # (1, V)
        written = logits[:, : tokenizer.vocab_size]  # the other rows of a vocabulary have no text
        ids.append(int(draw(written, _SAMPLING, uniforms([generator])).item()))
    if tokenizer.eod in ids:
        ids = ids[: ids.index(tokenizer.eod)]
    return tokenizer.decode(ids)
