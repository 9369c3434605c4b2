"""Does muP keep activations' size over widths, and the best learning rate (Tensor Programs V, 2203.03466)?

python benchmarks/mup.py                    coordinate check (appendix D.1), to results/mup.json
python benchmarks/mup.py --transfer PREFIX  losses by learning rate and width, to results/mup_transfer.json

Coordinate check: models of several widths train on the same tokens, with and without --use-mup. With it, and
with a learning rate found at the smallest width, the change of each activation since the first step is about
the same at every width. Without it, initial weights are scaled by hand in the same way, so that what is seen
is due to learning rates and multipliers alone. Transfer: runs of pretrain_gpt.py on the tokens of PREFIX,
which are bytes.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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

ROOT = Path(__file__).resolve().parents[1]
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


def final_loss(prefix: str, width: int, *, mup: bool, learning_rate: float, steps: int) -> float:
    """The mean loss of a run's last tenth of steps, on text that it has not read before."""
    flags = f"--train-data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256 --num-layers 2"
    flags += f" --hidden-size {width} --num-attention-heads {HEADS} --seq-length 128 --micro-batch-size 16"
    flags += " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    std = STD if mup else STD / (width / WIDTHS[0]) ** 0.5
    flags += f" --untie-embeddings-and-output-weights --init-method-std {std}"
    flags += f" --attention-dropout 0 --hidden-dropout 0 --train-iters {steps} --lr {learning_rate}"
    flags += (
        f" --lr-warmup-iters {steps // 10} --weight-decay 0 --adam-beta2 0.95 --eval-iters 0 --device cpu"
    )
    flags += " --log-interval 1 --num-workers 0"
    if mup:
        flags += f" --use-mup --mup-base-hidden-size {WIDTHS[0]} --mup-base-head-dim {WIDTHS[0] // HEADS}"
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        command = [sys.executable, "pretrain_gpt.py", *flags.split(), "--metrics-file", str(metrics)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 3:  # NaN
            return math.inf
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.fmean(record["lm_loss"] for record in records[-steps // 10 :])


def transfer(prefix: str, widths: Sequence[int], rates: Sequence[float], steps: int) -> None:
    """Losses by width and learning rate; at the smallest width both parametrisations are one."""
    losses: dict[str, dict[int, list[float]]] = {"mup": {}, "standard": {}}
    for width in widths:
        for name, by_width in losses.items():
            if name == "standard" and width == WIDTHS[0]:
                by_width[width] = losses["mup"][width]
                continue
            runs = (
                final_loss(prefix, width, mup=name == "mup", learning_rate=rate, steps=steps)
                for rate in rates
            )
            by_width[width] = [round(loss, 4) for loss in runs]
            print(name, width, by_width[width], flush=True)
    best = {
        name: {width: rates[by_rate.index(min(by_rate))] for width, by_rate in found.items()}
        for name, found in losses.items()
    }
    write_result("mup_transfer", {"learning_rates": rates, "steps": steps, "losses": losses, "best": best})


def main() -> None:
    """Changes by width, and how many times the widest model's are those of the narrowest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the smallest width")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--transfer", metavar="PREFIX", help="prefix of a data set of bytes")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128], help="of --transfer")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**-n for n in range(10, 3, -1)])
    given = parser.parse_args()
    if given.transfer:
        transfer(given.transfer, given.widths, given.rates, given.steps)
        return
    figures: dict[str, object] = {
        "widths": WIDTHS,
        "learning_rate": given.learning_rate,
        "steps": given.steps,
    }
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
