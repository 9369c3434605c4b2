"""What config.json says of a model, and ours of it: mapped, refused, exported; no files, no weights."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.shapes.huggingface import FAMILIES as CONFIGS
from megatron_zpp.config.shapes.huggingface import describe_model
from megatron_zpp.config.shapes.huggingface_export import huggingface_values
from megatron_zpp.config.shapes.presets import PRESETS
from tests.model.families import BOTH_KINDS
from tests.support import refusal

LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 128}
NOT = ": not supported: "
GEMMA3, OLMO3, PHI3 = ({"model_type": name} for name in ("gemma3_text", "olmo3", "phi3"))
YARN = {"type": "yarn", "factor": 2.0}
BLOOM = {"model_type": "bloom", "vocab_size": 100, "n_embed": 64, "n_layer": 2, "num_attention_heads": 4}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported; must be "silu"'),
        ({"attention_bias": True}, "attention_bias true with mlp_bias false is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, 'rope_type "longrope" is not supported; must be default,'),
        ({"rope_scaling": YARN | {"factor": "x"}}, 'factor of rope is "x"; must be a number above 0'),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "embeddings is 0; must be an int"),
        (OLMO3 | {"rope_scaling": YARN | {"truncate": False}}, "truncate of rope false is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; must be 1.0"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type "linear" is not supported'),
        (PHI3 | {"rope_scaling": {"type": "su", "long_factor": []}}, "short_factor of rope is null; must be"),
        ({"model_type": "glm4", "attention_bias": 1}, "attention_bias is 1; must be true or false"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "low_freq_factor 2.0 is not supported; must be 1.0",
        ),
        ({"rope_parameters": {"rope_theta": "x"}}, 'rope_theta of rope is "x"; must be a number'),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; must be null or a positive"),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window is 1; must be true or false"),
        (QWEN2 | {"max_window_layers": -1}, "max_window_layers is -1; must be 0 or more"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 2}, "must be a list that names full_attention or"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0; must be a number above 0"),
        ({"model_type": "granite", "embedding_multiplier": "x"}, 'embedding_multiplier is "x"; must be a'),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is [1]; must be a list with"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; must be"),
        (GEMMA3 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is null; must be a number above 0"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; must be a positive integer"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": 3}}, "sliding_attention of rope is 3; must be"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "full_attention of rope is 3; must be an obj"),
        (GEMMA3 | {"final_logit_softcapping": 0}, "final_logit_softcapping is 0; must be a number above 0"),
        ({"model_type": "falcon"}, 'model_type is "falcon"; must be one of gpt2, bloom, llama'),
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "layernorm true is not supported; must"),
        ({"model_type": "starcoder2", "use_bias": 1}, "use_bias is 1; must be true or false"),
        ({"model_type": "mixtral", "num_local_experts": 8}, NOT + "mixture of experts (num_local_experts 8)"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256},
            NOT + "mixture of experts (n_routed_experts 256), multi-latent attention (kv_lora_rank 512)",
        ),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 0, "mamba_d_state": 128},
            NOT + "layers without attention (mamba_d_state 128)",
        ),
        (
            {"model_type": "gemma3n", "text_config": {"hidden_size_per_layer_input": 256}},
            NOT + "embeddings per layer (hidden_size_per_layer_input 256)",
        ),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, NOT + "mixture of experts (num"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3; must be an object"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral3"}},
            'model_type of text_config is "mistral3"; must be a text\'s',
        ),
        (
            {"model_type": "mistral3", "text_config": {"layer_types": BOTH_KINDS}},
            "layer_types of text_config",
        ),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping of text_config 30.0 is not supported",
        ),
        ({"model_type": "qwen3_vl", "vision_config": {}}, NOT + "images beside text (vision_config)"),
        ({"model_type": {}}, "model_type is {}; must be one of gpt2, bloom, llama"),
        ({"quantization_config": {}}, "quantization_config {} is not supported"),
        ({"is_causal": False}, "is_causal false is not supported; must be true"),
        (BLOOM | {"slow_but_exact": True}, "slow_but_exact true is not supported; must be false"),
        (
            GEMMA3 | {"attn_logit_softcapping": 2.0},
            "attn_logit_softcapping 2.0 is not supported; must be null",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "must be full_attention in all layers without a window"),
        (GEMMA3 | {"sliding_window": None}, "must be full_attention in all layers without a window"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"type": "default"}},
            "not supported; must be omitted, because rope_parameters say something else",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "full_attention of rope {} is not supported; must be om",
        ),
        (
            {"rope_theta": 100, "rope_scaling": {"type": "default", "rope_theta": 200}},
            "rope_theta 100.0 is not supported; must be 200.0, as in rope",
        ),
        (GEMMA3 | {"rope_parameters": YARN}, "must be an object with full_attention and sliding_attention"),
        (
            OLMO3 | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"type": "linear"}}},
            'rope_type of sliding_attention "linear" is not supported; must be default',
        ),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 64}}
            | {"original_max_position_embeddings": 32},
            "original_max_position_embeddings 32 is not supported; must be 64, as in rope",
        ),
    ],
)
def test_what_no_flag_expresses_is_refused_with_its_key(changes: dict[str, Any], said: str) -> None:
    error = refusal(describe_model, LLAMA | changes)
    assert error.startswith("config.json: ")
    assert said in error


STARCODER2_FIELDS = describe_model(LLAMA | {"model_type": "starcoder2"}).fields
BLOOM_FIELDS = describe_model(BLOOM).fields
GEMMA3_FIELDS = describe_model(LLAMA | GEMMA3).fields


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position_embedding_type": "none"}, "--position-embedding-type none"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"rotary_interleaved": True, "window_size": "7,0"}, "--rotary-interleaved True"),
        (STARCODER2_FIELDS | {"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "--qk-layernorm True"),
        ({"window_size": "7,0", "window_attn_skip_freq": "2"}, "--window-attn-skip-freq 2"),
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p True"),
        ({"embedding_multiplier": 2.0, "qk_layernorm": True}, "--embedding-multiplier 2.0"),
        ({"no_rope_freq": "4", "window_size": "7,0"}, "--no-rope-freq 4"),
        (STARCODER2_FIELDS | {"qk_layernorm": True}, "--qk-layernorm True"),
        (STARCODER2_FIELDS | {"window_size": "7,0", "window_attn_skip_freq": "2"}, "--window-attn-skip-f"),
        (GEMMA3_FIELDS | {"use_rope_scaling": False, "embedding_multiplier": 3.0}, "--embedding-multipl"),
        (GEMMA3_FIELDS | {"softmax_scale": 0.1234}, "--softmax-scale 0.1234"),
        ({"attn_logit_softcapping": 50.0}, "--attn-logit-softcapping 50.0"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
        (BLOOM_FIELDS | {"ffn_hidden_size": 100}, "--ffn-hidden-size 100"),
    ],
)
def test_what_transformers_cannot_compute_is_not_exported(changes: dict[str, Any], said: str) -> None:
    shape: dict[str, Any] = {"model_preset": "llama3.2-1b", "seq_length": 64}
    if "hidden_size" in changes:
        shape = {"seq_length": 64}
    config = ModelConfig(**shape | changes)
    subject, cannot, _ = refusal(huggingface_values, config, 100, 0).partition(" cannot be exported")
    assert said in subject
    assert cannot


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (LLAMA | {"sliding_window": 32}, [None, None]),  # no key of a Llama
        (LLAMA | {"model_type": "mistral", "sliding_window": 32}, [32, 32]),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, [None, None]),
        (LLAMA | {"model_type": "mistral"}, [None, None]),  # 4096, of 128 positions
        (LLAMA | QWEN2, [None, None]),  # from layer 28 on
        (LLAMA | QWEN2 | {"max_window_layers": 1}, [None, 16]),
        (LLAMA | QWEN2 | {"max_window_layers": 0}, [16, 16]),
        (LLAMA | QWEN2 | {"layer_types": ["sliding_attention", "full_attention"]}, [16, None]),
        (LLAMA | QWEN2 | {"use_sliding_window": False, "max_window_layers": 0}, [None, None]),
    ],
)
def test_windows_of_config_json(values: dict[str, Any], windows: list[int | None]) -> None:
    config = ModelConfig(**describe_model(values).fields, seq_length=64)
    assert list(config.layer_windows) == windows
    again = ModelConfig(**describe_model(huggingface_values(config, 100, 0)).fields, seq_length=64)
    assert again.layer_windows == config.layer_windows


def test_layer_types_make_a_mistral_a_ministral() -> None:
    """To transformers' AutoConfig. It has no Mistral for such a model, so that none is exported."""
    values = LLAMA | {"model_type": "mistral", "sliding_window": 32, "layer_types": BOTH_KINDS}
    config = ModelConfig(**describe_model(values).fields, seq_length=64)
    assert list(config.layer_windows) == [32, None]


@pytest.mark.parametrize("layers", [[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]])
def test_layers_without_rope_survive_config_json(layers: list[int]) -> None:
    """Whichever they are, and however a flag spells them."""
    values = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": layers}
    config = ModelConfig(**describe_model(values).fields, seq_length=64)
    assert list(config.layers_with_rope) == layers
    spelled = replace(config, no_rope_freq="+".join(f"[{1 - each}]" for each in layers))
    assert huggingface_values(spelled, 100, 0).get("no_rope_layers", [1, 1, 1]) == layers


def test_a_window_of_all_positions_is_none_in_config_json() -> None:
    config = ModelConfig(**describe_model(LLAMA).fields | {"window_size": "127,0"}, seq_length=64)
    values = huggingface_values(config, 100, 0)
    assert values["model_type"] == "llama"
    assert "sliding_window" not in values


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "mistral", "starcoder2", "qwen2", "qwen3"])
def test_keys_that_are_omitted_have_the_defaults_of_transformers(family: str) -> None:
    """Of which Qwen's 32 heads of keys and values do not depend on the heads of queries."""
    class_of = CONFIG_MAPPING[family]
    values = class_of(**{} if family in ("gpt2", "bloom") else {"num_attention_heads": 64}).to_dict()
    needed = {*CONFIGS[family].keys, "model_type", "vocab_size"} - CONFIGS[family].defaults.keys()
    shown, bare = (
        ModelConfig(**describe_model(each).fields, seq_length=16)
        for each in (values, {key: values[key] for key in needed})
    )
    assert bare == shown


@pytest.mark.parametrize("preset", [name for name in PRESETS if "hidden_dropout" in PRESETS[name]])
def test_presets_survive_config_json(preset: str, tmp_path: Path) -> None:
    """All values of a preset are the model's; what is exported describes the same model to --model-preset."""
    config = ModelConfig(model_preset=preset, seq_length=64)
    assert vars(config) | PRESETS[preset] | {"seq_length": 64} == vars(config)
    (tmp_path / "config.json").write_text(json.dumps(huggingface_values(config, 100, 0)))
    again = ModelConfig(model_preset=str(tmp_path), seq_length=64)
    assert vars(again) == vars(config) | {"model_preset": None}


@pytest.mark.parametrize("preset", ["gemma3-4b", "olmo3-32b"])
def test_config_json_says_the_same_to_transformers_4(preset: str) -> None:
    """It does not read rope_parameters, and took such a model's rope as unscaled."""
    values = huggingface_values(ModelConfig(model_preset=preset, seq_length=64), 100, 0)
    assert values["rope_scaling"]["factor"] == values["rope_parameters"]["full_attention"]["factor"]
    old = {key: value for key, value in values.items() if key != "rope_parameters"}
    assert describe_model(old) == describe_model(values)


# Multipliers say what muP does, a GPT-2 has these biases anyway, and a model in fp32 has its sums in fp32.
UNSAID = ("use_mup", "add_qkv_bias", "fp32_residual_connection")
SWITCHES = [each.name for each in fields(ModelConfig) if each.default is False and each.name not in UNSAID]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("preset", ["345m", "llama3.2-1b"])
def test_no_switch_is_lost_in_config_json(preset: str, switch: str) -> None:
    """It is in the model that config.json describes, or no preset has it, or the model is not exported."""
    try:
        config = ModelConfig(model_preset=preset, seq_length=64, **{switch: True})
        values = huggingface_values(config, 100, 0)
    except ValueError as error:
        refused = str(error)
    else:
        again, refused = ModelConfig(**describe_model(values).fields, seq_length=64), ""
        assert {**vars(again), "model_preset": preset, switch: True} == vars(config)
        assert getattr(again, switch), "config.json does not say it"
    assert not refused or re.search(r"needs|contradicts|cannot be exported", refused), refused


YARN_FLAGS = {"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 32}
LONGROPE_FLAGS = {
    **{"position_embedding_type": "longrope", "yarn_original_max_position_embeddings": 32},
    **{"longrope_short_factor": (1.0,) * 6, "longrope_long_factor": (2.0,) * 6, "rotary_percent": 0.75},
}


@pytest.mark.parametrize(
    "flags",
    [
        YARN_FLAGS | {"yarn_beta_fast": 20.0, "yarn_correction_range_round_to_int": False},
        YARN_FLAGS | {"mscale": 0.7, "mscale_all_dim": 0.5},
        YARN_FLAGS | {"mscale": 0.0},
        YARN_FLAGS
        | {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_across_heads": True}
        | {"window_size": "7,0", "window_attn_skip_freq": "2"},
        LONGROPE_FLAGS,
        LONGROPE_FLAGS | {"rotary_scaling_factor": 3.0, "window_size": "7,0"},
        {"rotary_interleaved": True, "rotary_percent": 0.5, "add_qkv_bias": True},
        {"rotary_ntk_factor": 4.0},
    ],
    ids=str,
)
def test_positions_survive_config_json(flags: dict[str, Any]) -> None:
    """But for NTK scaling, which becomes a larger base."""
    config = ModelConfig(**describe_model(LLAMA).fields | flags, seq_length=64)
    again = ModelConfig(**describe_model(huggingface_values(config, 100, 0)).fields, seq_length=64)
    expected = replace(config, rotary_base=config.scaled_rotary_base, rotary_ntk_factor=None)
    for name, value in vars(expected).items():
        close = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        assert getattr(again, name) == close, name
