"""Texts that the model writes during training, for a person to read."""

from collections.abc import Callable, Sequence

import torch

from megatron_zpp.config.root import Config
from megatron_zpp.generate.draw import Sampling, draw, generator_of, uniforms
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.zero.engine import ZeroEngine

_SAMPLING, _SEED = Sampling(temperature=0.8, top_k=50), 1234
_NEW_TOKENS = 64


def text_writer(engine: ZeroEngine, config: Config, prompts: Sequence[str]) -> Callable[[], list[str]]:
    """What returns each prompt with the model's continuation of 64 tokens; every rank must call it.

    All ranks run the same number of forwards, because each forward gathers sharded parameters. Their random
    numbers are generators of their own, so a run's weights do not depend on its prompts.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    sharing = engine.mesh.tensor_ranks * engine.mesh.context_ranks
    shared = sharing > 1  # they compute samples of one length alone
    positions = config.model.seq_length if shared else config.model.max_position_embeddings

    def write(prompt: str) -> str:
        ids = tokenizer.encode(prompt)
        generator = generator_of(_SEED, ids, copy=0)
        for _ in range(_NEW_TOKENS):
            window = ids[-positions:]
            padding = [0] * (positions - len(window)) if shared else []  # no token attends to what follows it
            tokens = torch.tensor([window + padding])  # (1, T)
            logits = engine.next_token_logits(tokens, after=len(window) - 1)[None]  # (1, V)
            # Other rows of a vocabulary have no text. The sums of `draw` have a fixed order on CPUs alone.
            written = logits[:, : tokenizer.vocab_size].cpu()
            ids.append(int(draw(written, _SAMPLING, uniforms([generator])).item()))
        if tokenizer.eod in ids:
            ids = ids[: ids.index(tokenizer.eod)]
        return tokenizer.decode(ids)

    return lambda: [write(prompt) for prompt in prompts]
