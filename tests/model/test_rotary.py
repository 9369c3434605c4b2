"""Rotary positions against transformers', and the property that they are made for."""

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.positions import ROTARY
from megatron_zpp.model.rotary import rotary_embeddings

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def heads(width: int, tokens: int = 7) -> torch.Tensor:
    return torch.randn(2, tokens, 3, width, generator=torch.Generator().manual_seed(1))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048}
FACTORS = {
    name: [first + i / 20 for i in range(64)] for name, first in (("short_factor", 1), ("long_factor", 2))
}
ORIGINAL = "yarn_original_max_position_embeddings"
SCALINGS: dict[str, tuple[dict, dict]] = {  # transformers' parameters, and flags
    "rope": ({"rope_type": "default"}, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"rotary_seq_len_interpolation_factor": 4.0}),
    "llama3": (LLAMA3, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
    "yarn": (YARN, {ORIGINAL: 2048}),  # the factor is that of the lengths
    "yarn-scaled": (
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {ORIGINAL: 2048, "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}
        | {"yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0, "yarn_correction_range_round_to_int": False},
    ),
    "longrope": (LONGROPE, {ORIGINAL: 2048}),
}


@pytest.mark.parametrize(("width", "base"), [(40, 10_000.0), (64, 500_000.0), (128, 1_000_000.0)])
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("last", [2047, 8191])
def test_as_transformers_rotates(width: int, base: float, kind: str, last: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    parameters, flags = map(dict, SCALINGS[kind])
    if kind == "longrope":  # a factor per pair
        parameters |= {name: factors[: width // 2] for name, factors in FACTORS.items()}
        flags |= {f"longrope_{name}": tuple(factors[: width // 2]) for name, factors in FACTORS.items()}
    config = LlamaConfig(
        hidden_size=3 * width,
        num_attention_heads=3,
        head_dim=width,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": base, **parameters},
    )
    theirs = llama.LlamaRotaryEmbedding(config)
    ours, _ = rotary_embeddings(
        ModelConfig(
            **{"num_layers": 1, "hidden_size": 3 * width, "num_attention_heads": 3, "seq_length": 8192},
            position_embedding_type=kind.split("-")[0] if kind.split("-")[0] in ROTARY else "rope",
            rotary_base=base,
            **flags,
        )
    )
    positions = torch.arange(last + 1)[None]
    x = heads(width, last + 1)[:1]
    cos, sin = theirs(x, positions)
    expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    if kind != "longrope":
        torch.testing.assert_close(ours.frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    # fp32 angles of 8191 radians are known to 5e-4.
    torch.testing.assert_close(ours.rotation(positions)(x), expected, rtol=0, atol=2e-3)
    near = positions < 100
    torch.testing.assert_close(ours.rotation(positions)(x)[near], expected[near], rtol=1e-5, atol=1e-5)


def test_ntk_scaling_stretches_the_longest_wavelength_alone() -> None:
    shape = {"num_layers": 1, "hidden_size": 40, "num_attention_heads": 1, "seq_length": 8}
    plain, scaled = (
        rotary_embeddings(ModelConfig(**shape, position_embedding_type="rope", rotary_ntk_factor=factor))[0]
        for factor in (None, 8.0)
    )
    ratio = plain.frequencies / scaled.frequencies
    torch.testing.assert_close(ratio[[0, -1]], torch.tensor([1.0, 8.0]), rtol=1e-5, atol=0)
    assert (ratio.diff() > 0).all()
