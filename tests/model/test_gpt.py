"""What must not depend on settings; test_families.py has the GPT beside transformers'."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.build import build_model, norm_classes
from megatron_zpp.model.flops import flops_per_token, parameter_count
from megatron_zpp.model.gpt import GPT
from tests.model.variants import MODELS, NO_DROPOUT

VOCAB = 203  # not a multiple of anything that the tables are padded to
SHAPE = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 24}
TINY = ModelConfig(**SHAPE, max_position_embeddings=32, **NO_DROPOUT)


@pytest.mark.parametrize(
    "again",
    [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}],
    ids=["stored", "full"],
)
def test_chunks_of_an_mlp_are_computed_twice_with_one_dropout(again: dict[str, Any]) -> None:
    """Against autograd through the chunks of an MLP; a layer's recomputation leaves the MLP to them."""
    gpt = GPT(TINY, VOCAB, RecomputeConfig(mlp_chunks_for_training=3, **again)).initialize(5)
    dropped = dataclasses.replace(TINY, hidden_dropout=0.3)
    half = GPT(dropped, VOCAB, RecomputeConfig(mlp_chunks_for_training=3)).initialize(5).layers[1].halves[1]
    x = torch.randn(2, 21, 64, requires_grad=True)

    def by_chunks(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([half.run(part) for part in x.flatten(0, 1).split(16)]).view(x.shape)

    found = []
    for outputs in (half, by_chunks):
        torch.manual_seed(11)
        out = outputs(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), (x, *half.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    counted: list[int] = []
    gpt.layers[1].mlp.register_forward_hook(lambda *_: counted.append(1))
    tokens = torch.randint(VOCAB, (2, 22))
    gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    assert len(counted) == 2 * 3


@pytest.mark.parametrize(("model", "name"), [("gpt2", "FusedLayerNorm"), ("llama", "FusedRMSNorm")])
def test_apex_provides_every_norm(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of heads too; tests/gpu/test_apex.py has its kernels."""
    kinds: dict[str, type[nn.Module]] = {
        "FusedLayerNorm": type("FusedLayerNorm", (nn.LayerNorm,), {}),
        "FusedRMSNorm": type("FusedRMSNorm", (nn.RMSNorm,), {}),
    }
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "apex.normalization", SimpleNamespace(**kinds))
    gpt = build_model(dataclasses.replace(TINY, **MODELS[model]), VOCAB, norms=norm_classes("apex"))
    norms = {name: module for name, module in gpt.named_modules() if name.endswith("norm")}
    absent = ("output_norm", "embedding.norm")  # unless flags ask for them
    norms = {name: module for name, module in norms.items() if not name.endswith(absent)}
    identities = [module for module in norms.values() if isinstance(module, nn.Identity)]
    assert len(identities) == (0 if "qk_layernorm" in MODELS[model] else 2 * TINY.num_layers)
    assert {type(module) for module in norms.values()} - {nn.Identity} == {kinds[name]}


@pytest.mark.parametrize("model", MODELS)
def test_a_residual_in_fp32_is_the_sum_of_what_halves_add(model: str) -> None:
    """Bit for bit, in bf16; and its gradient is nearer to that of fp64 than with a residual in bf16."""
    config = dataclasses.replace(TINY, **MODELS[model], num_layers=12)
    tokens = torch.randint(VOCAB, (2, 25), generator=torch.Generator().manual_seed(3))
    added, sums = list[torch.Tensor](), list[torch.Tensor]()

    def gradient(wide: bool, dtype: torch.dtype) -> torch.Tensor:
        gpt = GPT(dataclasses.replace(config, fp32_residual_connection=wide), VOCAB).initialize(5)
        gpt.to(torch.bfloat16).to(dtype)
        if wide:
            parts = [part for layer in gpt.layers for part in (layer.attention, layer.mlp)]
            for module in (gpt.embedding, *parts):
                module.register_forward_hook(lambda *made: added.append(made[2]))
            gpt.head.norm.register_forward_pre_hook(lambda _, given: sums.append(given[0]))
        gpt(tokens[:, :-1], tokens[:, 1:]).backward()
        return gpt.layers[0].mlp.input.weight.grad.double()

    exact = gradient(False, torch.float64)
    errors = [(gradient(wide, torch.bfloat16) - exact).norm() for wide in (True, False)]
    assert torch.equal(sums[0], sum(added[1:], added[0]))
    assert sums[0].dtype == torch.float32
    assert errors[0] < 0.8 * errors[1]


def test_initial_weights_follow_the_paper() -> None:
    config = dataclasses.replace(TINY, hidden_size=256, num_layers=8)
    weights = dict(GPT(config, 1000).initialize(seed=1).named_parameters())
    assert weights["layers.3.mlp.input.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    residual = weights["layers.3.mlp.output.weight"].std().item()
    assert residual == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.02)
    assert torch.count_nonzero(weights["layers.3.mlp.input.bias"]) == 0
    assert torch.all(weights["layers.3.mlp_norm.weight"] == 1)
    assert torch.count_nonzero(weights["embedding.tokens.weight"][1000:]) == 0


def test_a_layer_alone_initialises_as_inside_a_deeper_model() -> None:
    """Values are keyed by seed and name: what else is built beside a tensor does not move its values."""
    shallow = GPT(dataclasses.replace(TINY, num_layers=1), VOCAB).initialize(9)
    deep = GPT(dataclasses.replace(TINY, num_layers=3), VOCAB).initialize(9)
    name = "layers.0.attention.qkv.weight"
    assert torch.equal(dict(shallow.named_parameters())[name], dict(deep.named_parameters())[name])
    other = GPT(TINY, VOCAB).initialize(10)
    assert not torch.equal(dict(other.named_parameters())[name], dict(deep.named_parameters())[name])


@pytest.mark.parametrize("untied", [False, True])
def test_counts_match_the_model(untied: bool) -> None:
    config = dataclasses.replace(TINY, untie_embeddings_and_output_weights=untied, kv_channels=24)
    model = GPT(config, VOCAB)
    assert parameter_count(config, VOCAB) == sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.embedding.positions.weight.numel()
    looked_up += model.embedding.tokens.weight.numel() if untied else 0
    expected = 6 * (parameter_count(config, VOCAB) - looked_up) + 12 * 3 * (4 * 24) * 24
    assert flops_per_token(config, VOCAB) == expected
