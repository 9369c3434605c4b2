"""A model whose forward pass is another one is refused by the name of the setting that makes it so."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.foreign.architecture import _ONLY, read_settings
from megatron_zpp.checkpoint.foreign.names import our_names
from megatron_zpp.checkpoint.imported import parameter_shapes, write_imported
from megatron_zpp.config.root import parse_command_line
from megatron_zpp.config.shapes.huggingface_export import huggingface_values
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.train.resume.checkpoint_arguments import read_arguments

GPT = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
OTHERS = {
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
    "rope_type": "yarn",
    "enable_mhc_connections": True,
    "hybrid_layer_pattern": "M*M*",
    "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_forward_pass_is_refused_by_name(name: str) -> None:
    off: dict[str, Any] = {each: values[-1] for each, values in _ONLY.items()}
    assert read_settings(Path("theirs"), GPT | off, 32)[0].num_layers == 2
    said = re.escape(f"its model has {name} {OTHERS[name]!s:.9}")
    with pytest.raises(ValueError, match=f"^theirs: {said}"):
        read_settings(Path("theirs"), GPT | off | {name: OTHERS[name]}, 32)


@pytest.mark.parametrize("prefix", ["language_model.embedding.", "1.", "tied_modules.embed."])
def test_the_norm_behind_the_embedding_is_known(prefix: str) -> None:
    """It belongs to the table in Megatron-DeepSpeed."""
    kinds = ("weight", "bias")
    found, _ = our_names(Path("theirs"), [f"{prefix}word_embeddings.norm.{kind}" for kind in kinds])
    assert list(found.values()) == [f"embedding.norm.{kind}" for kind in kinds]
    assert read_settings(Path("theirs"), GPT | {"embed_layernorm": True}, 32)[0].embed_layernorm


def test_the_rotary_base_is_read_by_megatron_deepspeeds_name() -> None:
    """--rotary-position-embeddings-theta is `rope_theta` in its args, and there is no `rotary_base`.

    Other arguments of rope are those of Megatron-LM.
    """
    yarn = {"rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8, "mscale": 0.7}
    args = GPT | yarn | {"position_embedding_type": "yarn", "rotary_interleaved": True, "rope_theta": 500_000}
    config = vars(read_settings(Path("theirs"), args, 32)[0])
    assert (config["rotary_base"], config["rotary_interleaved"]) == (500_000, True)
    assert {name: config[name] for name in yarn} == yarn
    core = args | {"rotary_scaling_factor": 1.0, "yarn_rotary_scaling_factor": 4.0, "mscale": 1.0}
    for same in (core | {"yarn_mscale": 0.7}, args | {"yarn_mscale": None}):
        assert vars(read_settings(Path("theirs"), same, 32)[0]) == config
    with pytest.raises(ValueError, match=r"its args say rotary_base 10000 and rope_theta 500000, two names"):
        read_settings(Path("theirs"), args | {"rotary_base": 10_000}, 32)


def test_the_scale_of_scores_is_read_without_mup_and_dropouts_are() -> None:
    given = {"softmax_scale": 0.5, "attention_dropout": 0.0, "hidden_dropout": 0.2}
    config = vars(read_settings(Path("theirs"), GPT | given, 32)[0])
    assert {name: config[name] for name in given} == given


def test_a_residual_sum_in_fp32_is_taken_over_by_16_bit_runs(tmp_path: Path) -> None:
    model, _ = read_settings(Path("theirs"), GPT | {"fp32_residual_connection": True}, 32)
    settings = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=89)
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(model, 90).items()}
    write_imported(tmp_path, model, weights.__getitem__, settings, build_tokenizer(settings))
    flags = f"--mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --use-checkpoint-args --load {tmp_path}"
    for number, wide in (("--bf16", True), ("--fp32", False)):
        parsed = parse_command_line([*flags.split(), number], saved=read_arguments)
        assert parsed.config.model.fp32_residual_connection is wide
    assert huggingface_values(model, 90, 0)["model_type"] == "gpt2"  # which says no format of the compute
