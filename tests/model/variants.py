"""The models that tests of everything else run with: fields of ModelConfig and flags beside the widths."""

from typing import Any

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
LLAMA: dict[str, Any] = {  # of 4 heads, or a multiple of 2
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
GEMMA: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name != "swiglu"},
    "geglu": True,
    "norm_placement": "both",
    "apply_layernorm_1p": True,
}
SCORES = {"position_embedding_type": "alibi", "softmax_type": "learnable", "attn_logit_softcapping": 1.0}
WINDOWS = {"window_size": "6,0", "window_attn_skip_freq": "2"}  # every second layer has none
MODELS: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA}


def flags_of(fields: dict[str, Any]) -> list[str]:
    """The same as flags of pretrain_gpt.py."""
    found = []
    for name, value in fields.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found
