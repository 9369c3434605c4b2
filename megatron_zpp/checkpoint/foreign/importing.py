"""Makes a checkpoint of iteration 0 from one of Megatron-LM's or DeepSpeed's."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.foreign.architecture import read_settings
from megatron_zpp.checkpoint.foreign.model import ForeignModel
from megatron_zpp.checkpoint.foreign.names import OUTPUT, TIED_COPY, TOKENS
from megatron_zpp.checkpoint.imported import parameter_shapes, write_imported
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SMALLEST = 2  # bytes of a weight, in bf16 or fp16
_NUMBER = re.compile(r"(^|\.)\d+(\.)")


def import_foreign(
    foreign: ForeignModel, named: int | None, target: Path, settings: TokenizerConfig, divisible_by: int
) -> list[str]:
    """Write `target`/iter_0000000, and return lines that say what was mapped and what was left out.

    `named` is the iteration in the directory's name. All weights are held in memory, in fp32.
    """
    if named is not None and foreign.iteration is not None and foreign.iteration != named:
        raise ValueError(
            f"{foreign.path}: holds iteration {foreign.iteration}, not {named}; rename it, or copy it again"
        )
    model, notes = read_settings(foreign.path, foreign.args, divisible_by)
    tokenizer = build_tokenizer(settings)
    weights = whole_weights(foreign, model, tokenizer)
    written = write_imported(target, model, weights.__getitem__, settings, tokenizer)
    numbers = sum(parameter.numel() for parameter in weights.values())
    rows = foreign.tensors[TOKENS].shape[0]
    padded = weights[TOKENS].shape[0]
    return [
        f"{foreign.path}: {foreign.kind}, iteration {foreign.iteration}",
        f"mapped: {len(weights)} parameters, {numbers:,} elements, of {model.num_layers} layers",
        *_mapping(foreign, weights),
        f"vocabulary: {tokenizer.vocab_size} entries; {rows} rows there, {padded} here, the rest is padding",
        *(f"left out: {line}" for line in foreign.left_out),
        *(f"note: {line}" for line in notes),
        written,
    ]


def _mapping(foreign: ForeignModel, weights: Mapping[str, Tensor]) -> list[str]:
    """Return a line per kind of parameter: its name there, and here; `*` stands for the number of a layer."""
    found: dict[str, str] = {}
    for ours in weights:
        kind = _NUMBER.sub(r"\1*\2", ours)
        found.setdefault(kind, _NUMBER.sub(r"\1*\2", foreign.tensors[ours].name))
    width = max(map(len, found.values()))
    return [f"  {theirs:{width}} -> {ours}" for ours, theirs in found.items()]


def whole_weights(foreign: ForeignModel, model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return all weights by our names in fp32. Raises ValueError unless they are exactly those of `model`."""
    path, tensors = foreign.path, dict(foreign.tensors)
    if f"layers.{model.num_layers - 1}.attention.qkv.weight" not in tensors:
        raise ValueError(
            f"{path}: its args say {model.num_layers} layers, and it does not have the last of them"
        )
    if model.num_layers > len(tensors):
        raise ValueError(f"{path}: its args say {model.num_layers} layers, and it has {len(tensors)} tensors")
    try:
        shapes = parameter_shapes(model, tokenizer.vocab_size)
    except RuntimeError as error:  # sizes beyond torch's numbers
        raise ValueError(f"{path}: its args describe no model of ours: {one_line(error)}") from None
    if not model.untie_embeddings_and_output_weights and OUTPUT in tensors:
        tensors[TIED_COPY] = tensors.pop(OUTPUT)
    for name in sorted(shapes.keys() - tensors.keys()):
        raise ValueError(f"{path}: has no {name}; its args ask for one of shape {shapes[name]}")
    for name in sorted(tensors.keys() - shapes.keys() - {TIED_COPY}):
        raise ValueError(f"{path}: has {name}, which is no part of the model that its args describe")
    elements = sum(map(math.prod, shapes.values()))
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if elements * _SMALLEST > stored:
        raise ValueError(
            f"{path}: its args describe {elements:,} weights, more than its files of {stored:,} bytes hold"
        )
    found = {}
    for name, shape in shapes.items():
        table = name in (TOKENS, OUTPUT)
        theirs = tensors[name].shape
        if table:
            _check_vocabulary(foreign, name, theirs[0], tokenizer)
        if theirs != ((theirs[0], *shape[1:]) if table else shape):
            raise ValueError(f"{path}: {name} has shape {theirs}; its args ask for {shape}")
        found[name] = _read(foreign, name, shape, model, tokenizer.vocab_size if table else None)
    if TIED_COPY in tensors:
        copy = _as_float(path, TIED_COPY, tensors[TIED_COPY].read())[: tokenizer.vocab_size]
        if not torch.equal(copy, found[TOKENS][: tokenizer.vocab_size]):
            raise ValueError(
                f"{path}: its output weights are not its token embedding, but its args say that both are one"
            )
    return found


def _as_float(path: Path, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in fp32. Raises ValueError for numbers that are no weights."""
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{path}: {name} has format {tensor.dtype}; must be fp32, fp64, bf16 or fp16")
    return tensor.float()


def _read(
    foreign: ForeignModel, name: str, shape: tuple[int, ...], model: ModelConfig, entries: int | None
) -> Tensor:
    weight = _as_float(foreign.path, name, foreign.tensors[name].read())
    if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
        return ungroup(weight, model)
    if entries is None:
        return weight.contiguous()
    table = torch.zeros(shape)
    table[:entries] = weight[:entries]
    return table


def ungroup(qkv: Tensor, model: ModelConfig) -> Tensor:
    """Return rows of all queries, then all keys, then all values.

    Megatron's rows are those of one query group after the other: its queries, its key, its value.
    """
    groups, width = model.num_query_groups, model.kv_channels
    each = model.num_attention_heads // groups
    rows = qkv.view(groups, each + 2, width, *qkv.shape[1:])  # (G, N / G + 2, H, …)
    parts = rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :]
    return torch.cat([part.reshape(-1, *qkv.shape[1:]) for part in parts])


def _check_vocabulary(foreign: ForeignModel, name: str, rows: int, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless `rows` can be the tokenizer's entries, padded as Megatron pads them."""
    args, entries = foreign.args, tokenizer.vocab_size
    sizes = args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size")
    multiple = math.prod(size for size in sizes if type(size) is int and size > 0)
    if not entries <= rows or rows - entries >= max(multiple, 128):
        raise ValueError(
            f"{foreign.path}: {name} has {rows} rows, and this {tokenizer.kind} has {entries} entries; "
            f"give the tokenizer of that model (its args say {args.get('tokenizer_type') or 'none'!s:.60})"
        )
