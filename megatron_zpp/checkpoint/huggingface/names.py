"""What transformers' models call our parameters, and which of their tensors make up one of ours."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_zpp.config.model import ModelConfig

TOKENS, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # tables that are padded
THEIR_OUTPUT = "lm_head.weight"
_OF_TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")  # in a model of text and images
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


class TransformersTensor(NamedTuple):
    """A tensor that holds `rows` rows of one of our parameters, all of its own or those from `first` on.

    The name has no prefix. `transposed`: a Conv1D's weight is (in, out), a Linear's (out, in). `rows_in_all`
    are those of the tensor.
    """

    name: str
    rows: int
    rows_in_all: int
    first: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """The names of one family of transformers' models.

    prefix    of all tensors but lm_head, unless the model without its head was saved
    fixed     names by ours, outside of layers
    layer     the beginning of names inside layer `{}`
    parts     by ours inside a layer: the modules whose rows make up the parameter, one after the other
    buffers   tensors that are no parameters, which old versions saved too
    by_head   whether queries, keys and values of a head are side by side, not those of all heads
    """

    prefix: str
    fixed: Mapping[str, str]
    layer: str
    parts: dict[str, tuple[str, ...]]
    buffers: re.Pattern[str]
    transposes: bool = False
    by_head: bool = False

    def tensors(
        self, ours: str, shape: tuple[int, ...], model: ModelConfig
    ) -> tuple[TransformersTensor, ...]:
        """Return the tensors that make up one of our parameters, in the order of its rows."""
        if ours in self.fixed:
            return (TransformersTensor(self.fixed[ours], shape[0], shape[0]),)
        match = _LAYER.fullmatch(ours)
        assert match is not None, f"{ours} is not a parameter of the GPT"
        index, part, kind = match.groups()
        modules = [f"{self.layer.format(index)}.{module}.{kind}" for module in self.parts[part]]
        if self.by_head and part == "attention.qkv":
            (module,), heads, width = modules, model.num_attention_heads, model.kv_channels
            return tuple(
                TransformersTensor(module, width, shape[0], (3 * head + each) * width)
                for each in range(3)  # queries, keys, values
                for head in range(heads)
            )
        transposed = self.transposes and len(shape) == 2
        return tuple(
            TransformersTensor(module, rows, rows, transposed=transposed)
            for module, rows in zip(modules, _rows(len(modules), shape, model), strict=True)
        )

    def with_prefix(self, name: str) -> str:
        """Return the name in a model with its head."""
        return name if name == THEIR_OUTPUT else self.prefix + name

    def bare(self, names: Iterable[str]) -> dict[str, str]:
        """Return tensors' names without the prefix, by their names; those of images are omitted."""
        if any(map(_OF_TEXT.match, names)):
            text = {name: _OF_TEXT.sub("", name) for name in names if not _OF_IMAGES.match(name)}
        else:
            text = {name: name for name in names}
        return {name: bare.removeprefix(self.prefix) for name, bare in text.items()}


def _rows(modules: int, shape: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    if modules == 3:  # queries, keys and values
        groups = model.num_query_groups * model.kv_channels
        return shape[0] - 2 * groups, groups, groups
    return (shape[0] // modules,) * modules  # one, or gate and value of the MLP


_HEAD = {"head.norm.weight": "ln_f.weight", "head.norm.bias": "ln_f.bias", OUTPUT: THEIR_OUTPUT}
_GPT2 = Names(
    prefix="transformer.",
    fixed={TOKENS: "wte.weight", "embedding.positions.weight": "wpe.weight", **_HEAD},
    layer="h.{}",
    parts={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),  # queries, keys, values of all heads one after the other, as ours
        "attention.output": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.input": ("mlp.c_fc",),
        "mlp.output": ("mlp.c_proj",),
    },
    buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
    transposes=True,
)
_BLOOM = Names(
    prefix="transformer.",
    fixed={
        TOKENS: "word_embeddings.weight",
        "embedding.norm.weight": "word_embeddings_layernorm.weight",
        "embedding.norm.bias": "word_embeddings_layernorm.bias",
        **_HEAD,
    },
    layer="h.{}",
    parts={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.output": ("self_attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.input": ("mlp.dense_h_to_4h",),
        "mlp.output": ("mlp.dense_4h_to_h",),
    },
    buffers=re.compile(r"(?!)"),  # none
    by_head=True,
)
_LLAMA = Names(
    prefix="model.",
    fixed={TOKENS: "embed_tokens.weight", "head.norm.weight": "norm.weight", OUTPUT: THEIR_OUTPUT},
    layer="layers.{}",
    parts={
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": ("self_attn.q_norm",),
        "attention.key_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "mlp.input": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.output": ("mlp.down_proj",),
    },
    buffers=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)


_NORMS = {  # of Llama-like models, by --norm-placement
    "before": {"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)},
    "after": {
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
    "both": {
        "attention_norm": ("input_layernorm",),
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
}


_OTHERS = {"gpt2": _GPT2, "bloom": _BLOOM}
_FUSED_MLP = {"mlp.input": ("mlp.gate_up_proj",)}
_PARTS = {  # of Llama-like models that call some parts otherwise
    "phi3": _FUSED_MLP | {"attention.qkv": ("self_attn.qkv_proj",)},
    "glm": _FUSED_MLP,
    "glm4": _FUSED_MLP
    | {
        "attention_output_norm": ("post_self_attn_layernorm",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp_output_norm": ("post_mlp_layernorm",),
    },
    "starcoder2": {"mlp.input": ("mlp.c_fc",), "mlp.output": ("mlp.c_proj",)},
}


def names_of(model: ModelConfig, model_type: str) -> Names:
    if model_type in _OTHERS:
        return _OTHERS[model_type]
    parts = _LLAMA.parts | _NORMS[model.norm_placement] | _PARTS.get(model_type, {})
    names = replace(_LLAMA, parts=parts)
    if model.normalization == "RMSNorm":
        return names
    return replace(names, fixed={**names.fixed, "head.norm.bias": "norm.bias"})
