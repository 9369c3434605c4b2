"""The held-out loss of a trained model by source, and what it writes at fixed prompts.

python benchmarks/real_run/sources.py --tokens DIR --checkpoint SAVE --output FILE

A checkpoint is a --save of pretrain_gpt.py, or state.safetensors of plain.py with --inputs and --shape. Both
are computed by the same code, in bf16 on a GPU and fp32 on a CPU, over windows side by side of each
held-out source in DIR.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.continuation import Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.loading import load_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer

PROMPTS = (
    "To install the package, run",
    "The kernel schedules a process when",
    "def read_lines(path):\n",
    "static int ",
    "The history of the free software movement",
)
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, help="of plain.py")
    parser.add_argument("--shape", type=int, nargs=3, help="of plain.py: layers, width, heads")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=512, help="of each source, at most")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    model = load_plain(options) if options.shape else load_model(str(options.checkpoint), None)[0]
    device = torch.device(options.device)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    losses = {}
    for path in sorted(options.tokens.glob("held_out-*_text_document.bin")):
        name = path.name.removeprefix("held_out-").removesuffix("_text_document.bin")
        loss, count = loss_of(model, np.memmap(path, np.uint16, "r"), options.windows, device)
        losses[name] = {"loss": loss, "perplexity": math.exp(loss), "tokens": count}
    tokenizer = GPT2BPETokenizer(str(options.tokens / "vocab.json"), str(options.tokens / "merges.txt"))
    texts = continue_texts(
        model,
        tokenizer,
        [tokenizer.encode(prompt) for prompt in PROMPTS],
        new_tokens=64 if device.type == "cuda" else 8,
        sampling=Sampling(0.8, 50, 0.0),
        seed=1234,
        stop=Stop(frozenset([tokenizer.eod]), ()),
        batch_size=len(PROMPTS),
    )
    samples = [prompt + text.text for prompt, text in zip(PROMPTS, texts, strict=True)]
    options.output.write_text(json.dumps({"by_source": losses, "samples": samples}, indent=2) + "\n")


def load_plain(options: argparse.Namespace) -> GPT:
    """Return the model of plain.py, whose parameters have the names of ours."""
    layers, width, heads = options.shape
    shapes = json.loads((options.inputs / "shapes.json").read_text())
    config = ModelConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=heads, seq_length=shapes["seq_length"]
    )
    with torch.device("meta"):
        model = GPT(config, shapes["vocabulary"])
    tensors = load_file(options.checkpoint)
    weights = {
        name.removeprefix("weight."): value for name, value in tensors.items() if name[:7] == "weight."
    }
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def loss_of(model: GPT, tokens: np.ndarray, windows: int, device: torch.device) -> tuple[float, int]:
    """Return the mean loss over the first windows, side by side, and the number of their tokens."""
    length = model.config.seq_length
    windows = min(windows, (len(tokens) - 1) // length)
    starts = np.arange(windows)[:, None] * length + np.arange(length + 1)
    total = 0.0
    with torch.no_grad():
        for first in range(0, windows, BATCH):
            rows = torch.from_numpy(tokens[starts[first : first + BATCH]].astype(np.int64)).to(device)
            total += model(rows[:, :-1], rows[:, 1:]).item() * len(rows)
    return total / windows, windows * length


if __name__ == "__main__":
    main()
