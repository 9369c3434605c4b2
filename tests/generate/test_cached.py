"""The cached forward against the model's own, and rows of a cache that begin, grow and leave alone."""

from collections.abc import Sequence

import torch

from megatron_zpp.generate.cached import Cache, decode, logits_of, prefill
from megatron_zpp.model.gpt import GPT

CLOSE = {"atol": 2e-4, "rtol": 1e-5}  # fp32 sums in another order; these logits are some tens


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: GPT, text: Sequence[int]) -> torch.Tensor:
    """Logits of the next token, without a cache."""
    return model(torch.tensor([text]))[0, -1]


def test_rows_of_unequal_length_know_nothing_of_each_other(model: GPT) -> None:
    """Each row gets what its text alone gets, while others leave."""
    texts = [ids(length, length) for length in (9, 1, 4, 9)]
    cache = Cache(model, 4, 20)
    x = prefill(model, cache, texts)
    for row, text in zip(x, texts, strict=True):
        assert torch.allclose(logits_of(model, row[len(text) - 1]), alone(model, text), **CLOSE)
    for kept, tokens in (([0, 1, 2, 3], 3), ([0, 2, 3], 4), ([0, 2], 4)):  # at last, two of equal length
        cache.keep(kept)
        texts = [texts[row] for row in kept]
        for token in range(tokens):
            for text in texts:
                text.append((token * 7 + len(text)) % 200)
            found = logits_of(model, decode(model, cache, [text[-1] for text in texts]))
            for row, text in zip(found, texts, strict=True):
                assert torch.allclose(row, alone(model, text), **CLOSE)
        assert cache.lengths == [len(text) for text in texts]


def test_what_fills_short_rows_leaves_nothing_behind(model: GPT) -> None:
    """A column that is masked takes part in products: a NaN in it would reach the text."""
    cache = Cache(model, 2, 9)
    prefill(model, cache, [ids(6), ids(9)])
    for layer in cache._layers:
        for kept in layer:
            assert kept[0, :, :6].any()
            assert not kept[0, :, 6:].any()
