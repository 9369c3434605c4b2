"""Coordinate check of muP (Tensor Programs V, 2203.03466, appendix D.1): do activations keep their size?

python benchmarks/mup.py   writes results/mup.json

Models of several widths train on the same tokens, with and without --use-mup. With it, and with a learning
rate found at the smallest width, the change of each activation since the first step is about the same at
every width. Without it, initial weights are scaled by hand in the same way, so that what is seen is due to
learning rates and multipliers alone.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import write_result
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import Layer

WIDTHS, HEADS, VOCAB, SEQ_LENGTH, BATCH = (32, 64, 128, 256), 4, 64, 32, 8
STD = 0.1  # at the smallest width
ADAM = {"eps": 1e-8, "weight_decay": 0.1}


def config_of(width: int, mup: bool) -> ModelConfig:
    """A Llama-like model whose heads widen with it."""
    base = WIDTHS[0]
    given: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": base, "mup_base_head_dim": base / HEADS}
    return ModelConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=HEADS,
        ffn_hidden_size=3 * width,
        seq_length=SEQ_LENGTH,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=STD if mup else STD / (width / base) ** 0.5,
        **(given if mup else {}),
    )


def changes(width: int, *, mup: bool, learning_rate: float, steps: int, seed: int = 3) -> dict[str, float]:
    """The mean change of each activation's elements after some steps, by its name; "logits" too."""
    model = GPT(config_of(width, mup), VOCAB).initialize(seed)
    factors = model.rate_factors()
    adam = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "lr": learning_rate * factors.get(name, 1.0),
                **ADAM,
                "eps": ADAM["eps"] * factors.get(name, 1.0),
            }
            for name, parameter in model.named_parameters()
        ]
    )
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[name] = output.detach()

    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for name, module in (("attention", layer.attention), ("mlp", layer.mlp), ("layer", layer)):
            module.register_forward_hook(partial(keep, f"{name} {index}"))
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(0))
    first: dict[str, Tensor] = {}
    for step in range(steps + 1):
        logits = model(tokens[:, :-1])
        seen["logits"] = logits.detach()
        first = first or dict(seen)
        if step < steps:
            adam.zero_grad()
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            adam.step()
    return {name: (seen[name] - first[name]).abs().mean().item() for name in seen}


def main() -> None:
    """Changes by width, and how many times the widest model's are those of the narrowest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the smallest width")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    figures: dict[str, object] = {"widths": WIDTHS, **vars(given)}
    for name, mup in (("mup", True), ("standard", False)):
        by_width = [
            changes(width, mup=mup, learning_rate=given.learning_rate, steps=given.steps) for width in WIDTHS
        ]
        figures[name] = {
            "changes": {each: [round(found[each], 5) for found in by_width] for each in by_width[0]},
            "widest_to_narrowest": {
                each: round(by_width[-1][each] / by_width[0][each], 3) for each in by_width[0]
            },
        }
    write_result("mup", figures)


if __name__ == "__main__":
    main()
