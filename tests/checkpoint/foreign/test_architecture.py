"""A model whose forward pass is another one is refused by the name of the setting that makes it so."""

import re
from pathlib import Path
from typing import Any

import pytest

from docs.site.megatron_flags import MEGATRON_FLAGS, current_flags, fate
from megatron_zpp.checkpoint.foreign.architecture import _ONLY, read_settings
from megatron_zpp.config.legacy.megatron_features import FEATURES

GPT = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
OTHERS = {
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
    "use_mup": True,
    "rope_type": "yarn",
    "enable_mhc_connections": True,
    "hybrid_layer_pattern": "M*M*",
    "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
}

# Why the command line refuses a flag of a model that ours cannot be: the note of one flag for each reason.
REASONS = ("--qk-l2-norm", "--mtp-num-layers", "--num-experts", "--moe-layer-freq", "--quick-geglu")
REASONS += ("--glu-linear-offset", "--softmax-type", "--use-mup", "--rotary-interleaved", "--rope-type")
REASONS += ("--rotary-scaling-factor", "--apply-residual-connection-post-layernorm")
# Flags that change nothing unless another setting does, which is refused by its own name.
OF_ANOTHER = {
    "num_experts": "moe- expert-model- overlap-moe- overlap-dispatch- ep-overlap- high-priority-a2a- "
    "use-grouped-gemm-for-shared-expert save-tokens-per-expert-interval",
    "multi_latent_attention": "mla- q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
    "cache-mla-latents mscale",
    "experimental_attention_variant": "dsa- no-dsa- disable-dsa- linear-",
    "is_hybrid_model": "mamba- disable-mamba- gdp-",
    "mtp_num_layers": "mtp-",
    "enable_mhc_connections": "mhc-",
    "use_mup": "mup-",
    "position_embedding_type": "yarn- no-yarn- relative-attention-",
}
TRAINING_ONLY = ("--qk-clip", "--qk-clip-alpha", "--qk-clip-threshold")  # scale weights after a step


@pytest.mark.parametrize("name", OTHERS)
def test_another_forward_pass_is_refused_by_name(name: str) -> None:
    off: dict[str, Any] = {each: values[-1] for each, values in _ONLY.items()}
    assert read_settings(Path("theirs"), GPT | off, 32).model.num_layers == 2
    said = re.escape(f"its model has {name} {OTHERS[name]!s:.9}")
    with pytest.raises(ValueError, match=f"^theirs: {said}"):
        read_settings(Path("theirs"), GPT | off | {name: OTHERS[name]}, 32)


def test_every_model_flag_that_a_run_refuses_is_refused_of_a_checkpoint() -> None:
    """If it fails, add the setting to `_ONLY`, or here to those that another setting turns on."""
    assert set(OF_ANOTHER) - {"position_embedding_type"} <= set(_ONLY)
    current = current_flags()
    reasons = {fate(name, current) for name in REASONS}
    refused = [name for name in MEGATRON_FLAGS if fate(name, current) in reasons]
    assert len(refused) > 100
    assert any(FEATURES["--use-mup"] in note for _, note in reasons)
    beginnings = tuple(f"--{word}" for words in OF_ANOTHER.values() for word in words.split())
    names = {name for name in refused if not name.startswith(beginnings)} - set(TRAINING_ONLY)
    assert {name.removeprefix("--").replace("-", "_") for name in names} - set(_ONLY) == set()
