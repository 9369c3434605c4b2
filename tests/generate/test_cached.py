"""The cached forward against the model's own, and against texts that have no others beside them."""

import torch

from megatron_zpp.generate.cached import Cache, hidden_states, next_logits
from megatron_zpp.model.gpt import GPT

CLOSE = {"atol": 2e-4, "rtol": 1e-5}  # fp32 sums in another order; these logits are some tens


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(200, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_token_by_token_gives_the_whole_forward(model: GPT) -> None:
    tokens = ids(3, 20)
    expected = model(tokens)
    cache = Cache(model, [0, 0, 0], 20)
    first = next_logits(model, tokens[:, :7], cache)
    assert torch.allclose(first, expected[:, 6], **CLOSE)
    for column in range(7, 20):
        found = next_logits(model, tokens[:, column : column + 1], cache)
        assert torch.allclose(found, expected[:, column], **CLOSE), column


def test_several_tokens_onto_a_cache(model: GPT) -> None:
    tokens = ids(2, 16)
    cache = Cache(model, [0, 0], 16)
    hidden_states(model, tokens[:, :5], cache)
    x = hidden_states(model, tokens[:, 5:], cache)
    logits = model.head(x, model.embedding.tokens.weight)[..., : model.vocab_size]
    assert torch.allclose(logits, model(tokens)[:, 5:], **CLOSE)


def test_hooks_of_layers_run_with_a_cache(model: GPT) -> None:
    """Hooks gather the parameters of a sharded model."""
    seen: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs, index=index: seen.append(index))
        for index, layer in enumerate(model.layers)
    ]
    next_logits(model, ids(1, 3), Cache(model, [0], 3))
    for handle in handles:
        handle.remove()
    assert seen == list(range(len(model.layers)))


def test_rows_of_unequal_length_know_nothing_of_each_other(model: GPT) -> None:
    """Whatever stands in the padding, each row gets what its text alone gets; also when others are gone."""
    texts = [ids(1, length, seed=length)[0] for length in (9, 1, 4)]
    padding = [9 - len(text) for text in texts]
    for filler in (0, 123):
        filled = torch.stack(
            [
                torch.cat([torch.full((empty,), filler), text])
                for empty, text in zip(padding, texts, strict=True)
            ]
        )
        cache = Cache(model, padding, 12)
        found = next_logits(model, filled, cache)
        for row, text in enumerate(texts):
            assert torch.allclose(found[row], model(text[None])[0, -1], **CLOSE)
        cache.keep([2, 1])
        more = torch.tensor([[5], [6]])
        found = next_logits(model, more, cache)
        for row, index in enumerate((2, 1)):
            alone = torch.cat([texts[index], more[row]])
            assert torch.allclose(found[row], model(alone[None])[0, -1], **CLOSE)
