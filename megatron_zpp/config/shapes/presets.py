"""Published model shapes by the name that --model-preset takes, as values of ModelConfig's fields.

Sources: GPT-3 paper, table 2.1, for GPT-2 and GPT-3 (gpt3-175b is 175b; 345m is Megatron-LM's GPT-2, 18b that
of the ZeRO++ tutorial); for the others config.json of the Hugging Face repository that ends a row.
The length is that of samples in the longest phase of pretraining (Llama 2 paper, 2.2; Llama 3 paper, 3.4.1;
Qwen3 report, 3.2; SmolLM2 paper, section 4; SmolLM3's blog; OLMo 2 paper, 2; Gemma 2 and 3 reports, 2; Phi-3
report, 2; StarCoder2 paper, 6; Granite 3.0 report; Mistral 7B paper, table 1, also for Mistral Small; Olmo 3
report, 3; not published for Phi-4 mini and GLM-4).
"""

import math
from typing import Any

_GPTS = """
    name       layers  width heads length
    gpt2-125m      12    768    12   1024
    345m           24   1024    16   1024
    760m           24   1536    16   1024
    1.3b           24   2048    16   1024
    2.7b           32   2560    32   2048
    6.7b           32   4096    32   2048
    13b            40   5120    40   2048
    18b            40   6144    32    512
    175b           96  12288    96   2048
    gpt3-175b      96  12288    96   2048
"""
_OTHERS = """
    name           layers width heads groups inner length longest entries repository
    llama2-7b         32   4096   32   32   11008   4096    4096   32000 meta-llama/Llama-2-7b-hf
    llama3.2-1b       16   2048   32    8    8192   8192  131072  128256 meta-llama/Llama-3.2-1B
    llama3.2-3b       28   3072   24    8    8192   8192  131072  128256 meta-llama/Llama-3.2-3B
    llama3.1-8b       32   4096   32    8   14336   8192  131072  128256 meta-llama/Llama-3.1-8B
    llama3.1-70b      80   8192   64    8   28672   8192  131072  128256 meta-llama/Llama-3.1-70B
    mistral-7b        32   4096   32    8   14336   8192   32768   32768 mistralai/Mistral-7B-v0.3
    mistral-small-24b 40   5120   32    8   32768   8192   32768  131072 mistralai/Mistral-Small-24B-Base-2501
    qwen3-0.6b        28   1024   16    8    3072   4096   32768  151936 Qwen/Qwen3-0.6B-Base
    qwen3-1.7b        28   2048   16    8    6144   4096   32768  151936 Qwen/Qwen3-1.7B-Base
    qwen3-4b          36   2560   32    8    9728   4096   32768  151936 Qwen/Qwen3-4B-Base
    qwen3-8b          36   4096   32    8   12288   4096   32768  151936 Qwen/Qwen3-8B-Base
    qwen3-14b         40   5120   40    8   17408   4096   32768  151936 Qwen/Qwen3-14B-Base
    qwen3-32b         64   5120   64    8   25600   4096   40960  151936 Qwen/Qwen3-32B
    smollm2-135m      30    576    9    3    1536   2048    8192   49152 HuggingFaceTB/SmolLM2-135M
    smollm2-1.7b      24   2048   32   32    8192   2048    8192   49152 HuggingFaceTB/SmolLM2-1.7B
    smollm3-3b        36   2048   16    4   11008   4096   65536  128256 HuggingFaceTB/SmolLM3-3B-Base
    olmo2-1b          16   2048   16   16    8192   4096    4096  100352 allenai/OLMo-2-0425-1B
    olmo2-7b          32   4096   32   32   11008   4096    4096  100352 allenai/OLMo-2-1124-7B
    olmo2-13b         40   5120   40   40   13824   4096    4096  100352 allenai/OLMo-2-1124-13B
    olmo2-32b         64   5120   40    8   27648   4096    4096  100352 allenai/OLMo-2-0325-32B
    olmo3-7b          32   4096   32   32   11008   8192   65536  100278 allenai/Olmo-3-1025-7B
    olmo3-32b         64   5120   40    8   27648   8192   65536  100278 allenai/Olmo-3-1125-32B
    granite3.3-2b     40   2048   32    8    8192   4096  131072   49159 ibm-granite/granite-3.3-2b-base
    granite3.3-8b     40   4096   32    8   12800   4096  131072   49159 ibm-granite/granite-3.3-8b-base
    gemma2-2b         26   2304    8    4    9216   8192    8192  256000 google/gemma-2-2b
    gemma2-9b         42   3584   16    8   14336   8192    8192  256000 google/gemma-2-9b
    gemma2-27b        46   4608   32   16   36864   8192    8192  256000 google/gemma-2-27b
    gemma3-1b         26   1152    4    1    6912  32768   32768  262144 google/gemma-3-1b-pt
    gemma3-4b         34   2560    8    4   10240  32768  131072  262208 google/gemma-3-4b-pt, its text
    gemma3-12b        48   3840   16    8   15360  32768  131072  262208 google/gemma-3-12b-pt, its text
    gemma3-27b        62   5376   32   16   21504  32768  131072  262208 google/gemma-3-27b-pt, its text
    glm4-9b           40   4096   32    2   13696   8192   32768  151552 THUDM/GLM-4-9B-0414
    phi3-mini         32   3072   32   32    8192   4096    4096   32064 microsoft/Phi-3-mini-4k-instruct
    phi4-mini         32   3072   24    8    8192   4096  131072  200064 microsoft/Phi-4-mini-instruct
    starcoder2-3b     30   3072   24    2   12288   4096   16384   49152 bigcode/starcoder2-3b
    starcoder2-7b     32   4608   36    4   18432   4096   16384   49152 bigcode/starcoder2-7b
    starcoder2-15b    40   6144   48    4   24576   4096   16384   49152 bigcode/starcoder2-15b
"""
_SHARED: dict[str, Any] = {  # by all of _OTHERS, unless they have another value
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_UNTIED = (  # presets whose names begin so have output weights of their own
    *("llama2", "llama3.1", "mistral", "qwen3-8b", "qwen3-14b", "qwen3-32b", "olmo", "glm4", "phi3"),
    "starcoder2-15b",
)
_PHI4_LONG = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
    *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845),
    *(5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158),
    *(11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105),
    *(25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71),
    *(32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)
_DETAILS: dict[str, dict[str, Any]] = {  # of presets whose names begin so; of several, the last one counts
    "llama3": {"rotary_base": 5e5, "use_rope_scaling": True, "rope_scaling_factor": 8.0},
    "llama3.2": {"rope_scaling_factor": 32.0},
    "mistral-7b": {"rotary_base": 1e6},
    "mistral-small": {"kv_channels": 128, "rotary_base": 1e8},
    "qwen3": {"kv_channels": 128, "rotary_base": 1e6, "norm_epsilon": 1e-6, "qk_layernorm": True},
    "smollm2-135m": {"rotary_base": 1e5, "init_method_std": 0.041666666666666664},
    "smollm2-1.7b": {"rotary_base": 1.3e5},
    "smollm3": {"rotary_base": 5e6, "norm_epsilon": 1e-6, "no_rope_freq": "4"},
    "olmo": {
        "rotary_base": 5e5,
        "norm_epsilon": 1e-6,
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    },
    "olmo3": {
        "position_embedding_type": "yarn",
        "yarn_original_max_position_embeddings": 8192,
        "rotary_scaling_factor": 8.0,
        "rotary_base_local": 5e5,
        "window_size": "4095,0",
        "window_attn_skip_freq": "4",
    },
    "granite3": {"rotary_base": 1e7, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granite3.3-2b": {"softmax_scale": 1 / 64, "logits_multiplier": 1 / 8},
    "granite3.3-8b": {"softmax_scale": 1 / 128, "logits_multiplier": 1 / 16},
    "gemma": {
        "swiglu": False,
        "geglu": True,
        "kv_channels": 256,
        "norm_epsilon": 1e-6,
        "norm_placement": "both",
        "apply_layernorm_1p": True,
        "softmax_scale": 256**-0.5,
    },
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "window_size": "4095,0",
        "window_attn_skip_freq": "2",
        "rotary_base": 10_000.0,
    },
    "gemma2-27b": {"kv_channels": 128, "softmax_scale": 144**-0.5},
    "gemma3": {
        "qk_layernorm": True,
        "window_size": "1023,0",
        "window_attn_skip_freq": "6",
        "rotary_base": 1e6,
        "rotary_base_local": 10_000.0,
        "rotary_seq_len_interpolation_factor": 8.0,
    },
    "gemma3-1b": {"window_size": "511,0", "rotary_seq_len_interpolation_factor": None},
    "gemma3-27b": {"kv_channels": 128, "softmax_scale": 168**-0.5},
    "glm4": {
        "kv_channels": 128,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "norm_placement": "both",
        "add_qkv_bias": True,
    },
    "phi3": {"window_size": "2046,0"},
    "phi4": {
        "position_embedding_type": "longrope",
        "rotary_percent": 0.75,
        "yarn_original_max_position_embeddings": 4096,
        "longrope_short_factor": (1.0,) * 48,
        "longrope_long_factor": _PHI4_LONG,
    },
    "starcoder2": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "disable_bias_linear": False,
        "window_size": "4095,0",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "init_method_std": 0.018042,
    },
    "starcoder2-3b": {"rotary_base": 999999.4420358813},
    "starcoder2-7b": {"rotary_base": 1e6},
    "starcoder2-15b": {"rotary_base": 1e5, "init_method_std": 0.01275},
}
_GPT_COLUMNS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_COLUMNS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"),
    *("seq_length", "max_position_embeddings"),
)


def _rows(table: str, columns: int) -> list[tuple[str, list[int]]]:
    """The name and the numbers of each row below the titles."""
    rows = [line.split() for line in table.strip().splitlines()[1:]]
    return [(name, [int(number) for number in numbers[:columns]]) for name, *numbers in rows]


def _fields(name: str, numbers: list[int]) -> dict[str, Any]:
    """The fields of ModelConfig for a row of _OTHERS."""
    sizes = dict(zip(_COLUMNS, numbers, strict=False))
    found = _SHARED | sizes
    found["group_query_attention"] = sizes["num_query_groups"] != sizes["num_attention_heads"]
    if name.startswith(_UNTIED):
        found["untie_embeddings_and_output_weights"] = True
    if name.startswith("gemma"):
        found["embedding_multiplier"] = math.sqrt(sizes["hidden_size"])
    for start, details in _DETAILS.items():
        found |= details if name.startswith(start) else {}
    return found


_PUBLISHED = dict(_rows(_OTHERS, len(_COLUMNS) + 1))
PRESETS: dict[str, dict[str, Any]] = {
    **{name: dict(zip(_GPT_COLUMNS, numbers, strict=True)) for name, numbers in _rows(_GPTS, 4)},
    **{name: _fields(name, numbers) for name, numbers in _PUBLISHED.items()},
}


def vocabulary_of(preset: str) -> int:
    """Rows of the table with which a preset was published; GPT-2's, which GPT-3 has too, for other names."""
    return _PUBLISHED[preset][-1] if preset in _PUBLISHED else 50257


def preset_names() -> str:
    """All presets for a person, those of a family in one word: qwen3-0.6b/1.7b/4b."""
    families: dict[str, list[str]] = {}
    for name in PRESETS:
        family, dash, size = name.rpartition("-")
        families.setdefault(family + dash, []).append(size)
    return ", ".join(
        ", ".join(sizes) if family == "" else family + "/".join(sizes) for family, sizes in families.items()
    )
