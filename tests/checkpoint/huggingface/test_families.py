"""Llama-like models from and to Hugging Face: bits, sharded files, runs at any stage, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megatron_zpp.checkpoint.huggingface.importing import open_weights, read_settings
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.root import Config, parse_command_line
from megatron_zpp.config.shapes.huggingface import FAMILIES as CONFIGS
from megatron_zpp.config.shapes.huggingface import describe_model
from megatron_zpp.config.shapes.huggingface_export import huggingface_values
from megatron_zpp.config.shapes.presets import PRESETS
from megatron_zpp.config.sources.huggingface import HuggingFaceModel
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.checkpoint.huggingface.gpt2 import SOURCE, check_equal, entries, save, tensors, theirs
from tests.model.families import BOTH_KINDS, FAMILIES, with_images
from tests.support import logged, nightly, refusal, trained

LENGTH = 16
RUN = (
    "--mock-data --micro-batch-size 2 --eval-iters 1 --num-workers 0 --seq-length 16 --train-iters 1 "
    "--lr 1e-30 --weight-decay 0"
).split()
SPARE = 64


def directory_of(family: str, bpe: Path, directory: Path, **how: Any) -> Path:
    """A model of the family and a tokenizer beside it; a Qwen has more rows than that has entries."""
    chosen = FAMILIES[family]
    settings = chosen.settings | {"vocab_size": entries(bpe) + SPARE * ("qwen" in family)}
    return save(type(chosen)(chosen.config, settings).model(), bpe, directory, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_then_export_returns_every_bit(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str
) -> None:
    """From several files; both commands compare logits with those of transformers.

    transformers reads a tokenizer beside a Qwen2 as Qwen2's own, which normalises texts; ours does not.
    """
    source = directory_of(family, bpe, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    for said in (
        tool("import", source, tmp_path / "ours"),
        tool("export", tmp_path / "ours", tmp_path / "back", *["--no-tokenizer"] * ("qwen2" in family)),
    ):
        assert "logits: largest difference" in said
    check_equal(tensors(tmp_path / "back"), tensors(source))
    rows = [
        json.loads((each / "config.json").read_text())["vocab_size"] for each in (tmp_path / "back", source)
    ]
    assert rows[0] == rows[1] == entries(bpe) + SPARE * ("qwen" in family)


@pytest.mark.parametrize("family", ["gemma3-full", "mistral-small"])
def test_of_a_model_of_images_the_text_is_imported(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str
) -> None:
    """Its logits are compared with those of the whole model, which has other names for its tensors."""
    chosen = FAMILIES[family]
    text = type(chosen)(chosen.config, chosen.settings | {"vocab_size": entries(bpe)}).model()
    source = save(with_images(text.config), bpe, tmp_path / "theirs")
    said = tool("import", source, tmp_path / "ours")
    assert "its text alone; the model of images is omitted" in said
    assert "logits: largest difference" in said
    tool("export", tmp_path / "ours", tmp_path / "back", "--no-tokenizer")
    whole, back = tensors(source), tensors(tmp_path / "back")
    assert len(back) == len(list(text.parameters()))
    check_equal(back, {name: whole[f"language_model.{name}"] for name in back})


@pytest.mark.parametrize(
    "family", ["qwen3", *map(nightly, "qwen2 gemma3 starcoder2-window olmo3 phi3 bloom-heads".split())]
)
def test_a_run_starts_from_a_llama(tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str) -> None:
    """With its shape and tokenizer; a step too small to change a weight saves what was loaded."""
    source = directory_of(family, bpe, tmp_path / "theirs")
    stage, world = ("0", 1) if family == "qwen3" else ("3", 2)
    flags = [*RUN, "--zero-stage", stage, "--load", f"hf:{source}", "--save", str(tmp_path / "run")]
    trained(*flags, processes=world)
    (source / "config.json").rename(source / "moved.json")  # a checkpoint does not need it
    tool("export", tmp_path / "run", tmp_path / "back", *["--no-tokenizer"] * ("qwen2" in family))
    check_equal(tensors(tmp_path / "back"), tensors(source))


@pytest.mark.parametrize("family", ["gpt2", "llama", nightly("qwen3"), nightly("mistral-window")])
def test_the_loss_of_a_run_is_that_of_transformers(bpe: Path, tmp_path: Path, family: str) -> None:
    """At the first step, of a run that hf:DIR alone gives model, weights and tokenizer."""
    if family == "gpt2":
        source = save(theirs(bpe), bpe, tmp_path / "theirs")
    else:
        source = directory_of(family, bpe, tmp_path / "theirs")
    tokenizer = HuggingFaceTokenizer(str(source))
    tokens = tokenizer.encode(SOURCE)[: 4 * LENGTH + 1]  # Megatron-LM's order does not cut them elsewhere
    with IndexedDatasetWriter(tmp_path / "data", np.uint16, provenance=describe(tokenizer)) as writer:
        writer.add_document(np.array(tokens))
    flags = f"--train-data-path {tmp_path}/data --seq-length {LENGTH} --micro-batch-size 4 --train-iters 1"
    flags += " --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --eval-iters 0 --num-workers 0"
    metrics = tmp_path / "metrics.jsonl"
    flags += f" --dataset-order megatron --log-interval 1 --metrics-file {metrics} --load hf:{source}"
    trained(*flags.split())
    loaded = AutoModelForCausalLM.from_pretrained(source).float().eval()
    windows = torch.tensor([tokens[first : first + LENGTH + 1] for first in range(0, 4 * LENGTH, LENGTH)])
    with torch.no_grad():
        logits = loaded(windows[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()
    assert logged(metrics) == [pytest.approx(expected, rel=1e-5)]


OF_MODEL = "the model of --load hf:{0} has"


@pytest.mark.parametrize(
    ("family", "given", "said"),
    [
        ("qwen3", "--padded-vocab-size 384", f"--padded-vocab-size 384: {OF_MODEL} vocab_size {{1}}"),
        ("llama", "--padded-vocab-size 7", "must be at least {2}, the tokenizer's entries"),
        ("qwen3", "--rotary-base 500", f"--rotary-base 500.0: {OF_MODEL} rotary_base 10000.0; omit it"),
        ("llama", "--squared-relu", f"--squared-relu (given): {OF_MODEL} squared_relu False; omit it"),
        ("llama", "--num-layers 3", f"--num-layers 3: {OF_MODEL} num_hidden_layers 2; omit it"),
        ("llama", "--model-preset 1.3b", f"--model-preset 1.3b: has num_layers 24, and {OF_MODEL}"),
        ("llama", "--seq-length 65", "must be at most --max-position-embeddings 64 (--max-position-"),
        ("llama", "--use-checkpoint-args", "--load hf:{0} has no arguments, and gives the model"),
    ],
)
def test_flags_that_contradict_the_model_are_refused_with_both_values(
    bpe: Path, tmp_path: Path, family: str, given: str, said: str
) -> None:
    source = directory_of(family, bpe, tmp_path / "theirs")
    error = refusal(started, source, given)
    assert error.startswith("--")
    assert said.format(source, entries(bpe) + SPARE, entries(bpe)) in error


def test_flags_that_repeat_the_model_are_obeyed(bpe: Path, tmp_path: Path) -> None:
    """Whatever name a value has; lengths, dropout and another tokenizer are the run's own."""
    source = directory_of("llama", bpe, tmp_path / "theirs")
    alone = started(source)
    assert alone.model.seq_length == 64
    assert started(source, f"--model-preset {source} --num-layers 2 --normalization rmsnorm") == alone
    files = f"--vocab-file {bpe}/vocab.json --merge-file {bpe}/merges.txt"
    published = replace(ModelConfig(model_preset="345m", seq_length=1024), model_preset=None)
    model = HuggingFaceModel(f"hf:{source}", published, {}, alone.tokenizer)
    argv = "--model-preset 345m --mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --load hf:x".split()
    assert parse_command_line(argv, huggingface=lambda *given: model).config.model == published
    other = started(source, f"--max-position-embeddings 32 --hidden-dropout 0.5 {files}")
    assert (other.model.seq_length, other.model.hidden_dropout) == (32, 0.5)
    assert other.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def started(source: Path, given: str = "") -> Config:
    """The settings of a run that has opened its weights."""
    argv = ["--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", *given.split()]
    config = parse_command_line([*argv, "--load", f"hf:{source}"], huggingface=read_settings).config
    open_weights(str(source), config.model, describe(build_tokenizer(config.tokenizer))).close()
    return config


def test_a_tokenizer_of_another_model_is_refused(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """No published model has as many rows without a token."""
    chosen = FAMILIES["qwen3"]
    other = type(chosen)(chosen.config, chosen.settings | {"vocab_size": entries(bpe) + 1024})
    source = save(other.model(), bpe, tmp_path / "theirs")
    with pytest.raises(ValueError, match="give the tokenizer of that model"):
        tool("import", source, tmp_path / "ours")


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


UNSAID = ("use_mup", "add_qkv_bias")  # multipliers say what muP does; a GPT-2 has these biases anyway
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
