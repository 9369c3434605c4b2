"""muP: Megatron-LM's rules as numbers, and its flags."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.foreign.architecture import read_settings
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.root import parse_command_line
from megatron_zpp.model.gpt import GPT
from tests.config.command_line import MINIMAL

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 16}
BASE = {"use_mup": True, "mup_base_hidden_size": 32}


@pytest.mark.parametrize(
    ("given", "scale", "logits"),
    [
        ({"use_mup": True}, 1 / 32, 1.0),  # the base itself
        (BASE, 1 / 32, 1 / 4),
        (BASE | {"mup_base_head_dim": 8.0}, math.sqrt(8) / 32, 1 / 4),
        (BASE | {"mup_attn_scale_power": 0.5}, 1 / math.sqrt(32), 1 / 4),
        (BASE | {"softmax_scale": 0.3, "logits_multiplier": 0.5}, 0.3, 0.5),
    ],
)
def test_multipliers_are_megatron_lms(given: dict, scale: float, logits: float) -> None:
    """Of TransformerConfig's __post_init__; a configuration that was saved gives itself."""
    config = ModelConfig(**SHAPE, **given)
    assert config.softmax_scale == pytest.approx(scale)
    assert config.logits_multiplier == logits
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("untied", [False, True])
def test_initial_weights_and_rates_of_layers_alone_are_scaled(untied: bool) -> None:
    more = {"untie_embeddings_and_output_weights": untied}
    wide = GPT(ModelConfig(**SHAPE, **BASE, **more), 1000).initialize(1)
    usual = GPT(ModelConfig(**SHAPE, **more), 1000).initialize(1)
    for (name, ours), theirs in zip(wide.named_parameters(), usual.parameters(), strict=True):
        scaled = name.startswith("layers.") and ours.dim() == 2
        assert torch.equal(ours, theirs / 2 if scaled else theirs), name
        assert wide.rate_factors().get(name, 1.0) == (1 / 4 if scaled else 1.0), name
    assert not usual.rate_factors()
    assert not GPT(ModelConfig(**SHAPE, use_mup=True), 1000).rate_factors()


def test_flags_are_megatron_lms() -> None:
    typed = (
        "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 --mup-output-mult 0.5 --mup-width-mult 2"
    )
    rope = "--position-embedding-type rope"
    parsed = parse_command_line([*MINIMAL, *typed.split(), *rope.split()])
    model = parsed.config.model
    assert (model.embedding_multiplier, model.logits_multiplier) == (3.0, 0.5)
    assert "--mup-output-mult is --logits-multiplier" in parsed.notes[0]


def test_a_checkpoint_of_megatron_lm_brings_its_multipliers() -> None:
    args = SHAPE | {"max_position_embeddings": 16, "position_embedding_type": "rope"}
    args |= {"mup_base_hidden_size": 32, "mup_embedding_mult": 3.0, "mup_output_mult": 1.0}
    assert not read_settings(Path("theirs"), args, 32)[0].use_mup
    model, _ = read_settings(Path("theirs"), args | {"use_mup": True}, 32)
    assert (model.embedding_multiplier, model.logits_multiplier) == (3.0, 0.25)
    assert model.softmax_scale == 1 / 32
