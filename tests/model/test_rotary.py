"""Rotary positions against transformers', and the property that they are made for."""

import pytest
import torch

from megatron_zpp.model.rotary import Llama3Scaling, RotaryEmbedding, frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def heads(width: int, tokens: int = 7) -> torch.Tensor:
    return torch.randn(2, tokens, 3, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("width", "base"), [(40, 10_000.0), (64, 500_000.0), (128, 1_000_000.0)])
@pytest.mark.parametrize("scaled", [False, True])
def test_as_transformers_rotates(width: int, base: float, scaled: bool) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    parameters = {"rope_theta": base, **(LLAMA3 if scaled else {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=3 * width,
        num_attention_heads=3,
        head_dim=width,
        max_position_embeddings=131_072,
        rope_parameters=parameters,
    )
    theirs = llama.LlamaRotaryEmbedding(config)
    found = frequencies(width, base, Llama3Scaling(factor=32.0) if scaled else None)
    torch.testing.assert_close(found, theirs.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([[0, 1, 2, 50, 1000, 2047, 8191]]).expand(2, -1)
    x = heads(width)
    cos, sin = theirs(x, positions)
    expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    ours = RotaryEmbedding(width, base, Llama3Scaling(factor=32.0) if scaled else None)
    # fp32 angles of 8191 radians are known to 5e-4.
    torch.testing.assert_close(ours.rotation(positions)(x), expected, rtol=0, atol=2e-3)
    near = positions < 100
    torch.testing.assert_close(ours.rotation(positions)(x)[near], expected[near], rtol=1e-5, atol=1e-5)


def test_channels_beyond_the_rotated_ones_are_unchanged() -> None:
    x = heads(40).bfloat16()
    out = RotaryEmbedding(20, 10_000.0).rotation(torch.arange(7)[None])(x)
    assert out.dtype == x.dtype
    assert torch.equal(out[..., 20:], x[..., 20:])
    assert torch.equal(out[:, 0], x[:, 0])  # position 0 is not rotated
    assert not torch.equal(out[:, 1:, :, :20], x[:, 1:, :, :20])
