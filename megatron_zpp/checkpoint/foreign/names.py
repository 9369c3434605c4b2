"""What Megatron-LM and Megatron-DeepSpeed call our parameters, and how their tensor ranks split them."""

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_zpp.mesh import Axis
from megatron_zpp.placement import Split

TOKENS, POSITIONS, OUTPUT = "embedding.tokens.weight", "embedding.positions.weight", "head.output.weight"
TIED_COPY = "(tied output)"  # a second copy of the token embedding, on the last pipeline stage

_PREFIX = re.compile(r"^((module|model|language_model)\.)+")
_OF_EMBEDDING = re.compile(r"(?:embedding\.|tied_modules\.embed\.)?(.+)")
_IN_EMBEDDING = {
    "word_embeddings.weight": TOKENS,
    "position_embeddings.weight": POSITIONS,
    "word_embeddings.norm.weight": "embedding.norm.weight",
    "word_embeddings.norm.bias": "embedding.norm.bias",
}
_FIXED = {
    "output_layer.weight": OUTPUT,
    "lm_head.weight": OUTPUT,
    "word_embeddings_for_head.weight": TIED_COPY,
}
_LAYER = re.compile(r"(?:decoder|encoder|transformer)\.layers\.(\d+)\.(.+?)[._](weight|bias)")
_SINKS = re.compile(
    r"(?:decoder|encoder|transformer)\.layers\.(\d+)\.self_attention\.core_attention\.softmax_offset"
)
_FINAL = re.compile(r"(?:(?:decoder|encoder|transformer)\.)?final_(?:layernorm|norm)\.(weight|bias)")
_PIPELINED = re.compile(r"(\d+)\.(.+)")  # of DeepSpeed's pipeline module: its number in the pipeline
_PARTS = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "self_attention.dense": "attention.output",
    "attention.dense": "attention.output",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.input",
    "mlp.dense_h_to_4h": "mlp.input",
    "mlp.linear_fc2": "mlp.output",
    "mlp.dense_4h_to_h": "mlp.output",
}
_BUFFERS = re.compile(r".*(_extra_state(/.*)?|rotary_(pos_)?emb\.inv_freq|attention_mask|\.bias_mask)")
_TRANSFORMERS = re.compile(r"(self_attn\.q_proj|attn\.c_attn)\.")


def our_names(path: Path, theirs: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return our name by theirs, and lines about tensors that are left out.

    Raises ValueError for tensors that are no part of our model, and for two of the same parameter.
    """
    renamed = {name: _PREFIX.sub("", name) for name in theirs}
    renamed = _number_pipeline(renamed)
    found: dict[str, str] = {}
    buffers = 0
    for name, bare in renamed.items():
        if _BUFFERS.fullmatch(bare):
            buffers += 1
            continue
        ours = _ours(bare)
        if ours is None:
            raise ValueError(f"{path}: its tensor {_shown(name)} is {_explain(name)}")
        if ours in found.values():
            if ours != TOKENS:
                raise ValueError(f"{path}: has {ours} twice, the second time as {_shown(name)}")
            ours = TIED_COPY
        found[name] = ours
    lines = [f"{buffers} buffers (_extra_state, inv_freq): no weights, made anew here"] if buffers else []
    return found, lines


def _number_pipeline(renamed: dict[str, str]) -> dict[str, str]:
    """Return names of DeepSpeed's pipeline module, `3.mlp.…`, as those of a model without pipeline."""
    matches = {name: match for name, bare in renamed.items() if (match := _PIPELINED.fullmatch(bare))}
    numbers = sorted({int(match[1]) for match in matches.values() if "attention" in match[2]})
    layers = {number: index for index, number in enumerate(numbers)}
    for name, match in matches.items():
        number, rest = int(match[1]), match[2]
        if number in layers:
            renamed[name] = f"encoder.layers.{layers[number]}.{rest}"
        elif rest in ("weight", "bias"):
            renamed[name] = f"encoder.final_layernorm.{rest}"
        else:
            renamed[name] = rest
    return renamed


def _ours(bare: str) -> str | None:
    if bare in _FIXED:
        return _FIXED[bare]
    if (match := _OF_EMBEDDING.fullmatch(bare)) and match[1] in _IN_EMBEDDING:
        return _IN_EMBEDDING[match[1]]
    if match := _FINAL.fullmatch(bare):
        return f"head.norm.{match[1]}"
    if match := _SINKS.fullmatch(bare):
        return f"layers.{int(match[1])}.attention.sinks"
    if (match := _LAYER.fullmatch(bare)) and match[2] in _PARTS:
        return f"layers.{int(match[1])}.{_PARTS[match[2]]}.{match[3]}"
    return None


def _explain(name: str) -> str:
    if _TRANSFORMERS.search(name):
        return (
            "of a model of transformers, not of Megatron's; save it by DeepSpeed's zero_to_fp32.py with "
            "--safe_serialization, and use megatron-zpp import"
        )
    return "no part of a dense GPT or Llama-like model"


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= 120 else repr(name)[:120]


def split_of(ours: str, shape: tuple[int, ...], ranks: int, *, gated: bool) -> Split | None:
    """Return how `ranks` tensor ranks split one of our parameters, of which each has `shape`.

    None for parameters of which all have copies. The rows of attention.qkv are whole query groups, rank after
    rank. With a gated MLP each rank has its rows of the gate, then those of the value.
    """
    axis = Axis(1, ranks)
    part = re.sub(r"^layers\.\d+\.", "", ours)
    if part in (TOKENS, OUTPUT, TIED_COPY, "attention.sinks") or part.startswith("attention.qkv."):
        return Split(0, (shape[0] * ranks,), axis)
    if part.startswith("mlp.input."):
        runs = 2 if gated else 1
        return Split(0, (shape[0] * ranks // runs,) * runs, axis)
    if part in ("attention.output.weight", "mlp.output.weight"):
        return Split(1, (shape[1] * ranks,), axis)
    return None
