"""What transformers' GPT-2 calls our parameters, and which of them it keeps transposed."""

import re
from typing import NamedTuple

PREFIX = "transformer."  # of all but lm_head, unless the bare GPT2Model was saved
TOKENS, OUTPUT = "embedding.tokens.weight", "head.output.weight"  # tables that are padded
THEIR_TOKENS, THEIR_OUTPUT = "wte.weight", "lm_head.weight"

_FIXED = {
    TOKENS: THEIR_TOKENS,
    "embedding.positions.weight": "wpe.weight",
    "head.norm.weight": "ln_f.weight",
    "head.norm.bias": "ln_f.bias",
    OUTPUT: THEIR_OUTPUT,
}
_IN_A_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",  # queries, keys, values of all heads one after the other, as ours
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.input": "mlp.c_fc",
    "mlp.output": "mlp.c_proj",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


class Theirs(NamedTuple):
    """A name without PREFIX; `transposed`: a Conv1D's weight is (in, out), a Linear's (out, in)."""

    name: str
    transposed: bool


def their_name(ours: str) -> Theirs:
    """The counterpart of one of our parameters."""
    if ours in _FIXED:
        return Theirs(_FIXED[ours], False)
    match = _LAYER.fullmatch(ours)
    assert match is not None, f"{ours} is not a parameter of the GPT"
    index, part, kind = match.groups()
    return Theirs(f"h.{index}.{_IN_A_LAYER[part]}.{kind}", kind == "weight" and "norm" not in part)


def with_prefix(name: str) -> str:
    """As GPT2LMHeadModel calls it."""
    return name if name == THEIR_OUTPUT else PREFIX + name


def is_mask(name: str) -> bool:
    """Whether it is the causal mask, which old versions saved beside the weights."""
    return _BUFFER.fullmatch(name) is not None
