"""Files as other programs write them: a byte-level BPE of `tokenizers`, a GPT-2 of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_gpt2(
    directory: Path, *, vocabulary: int, positions: int, width: int, heads: int, layers: int
) -> dict[str, tuple[int, ...]]:
    """A GPT-2 as transformers saves one: its config.json, and tensors of ones, whose shapes are returned."""
    of_layer = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    of_layer |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    norms = ["ln_f", *(f"h.{index}.{norm}" for index in range(layers) for norm in ("ln_1", "ln_2"))]
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    for index in range(layers):
        for name, shape in of_layer.items():
            shapes |= {f"h.{index}.{name}.weight": shape, f"h.{index}.{name}.bias": shape[1:]}
    shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
    config = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": positions, "n_embd": width}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | {"n_head": heads, "n_layer": layers}))
    ones: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(ones, directory / "model.safetensors", {"format": "pt"})
    return shapes


def train_bpe(site: Path, texts: list[str]) -> None:
    """Writes vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(texts, trainer)
    pipeline.model.save(str(site))
    pipeline.save(str(site / "tokenizer.json"))
