"""GPT-2 in plain PyTorch: the baseline of the real run, of whose step nothing is megatron_zpp's.

python -m benchmarks.real_run.plain --inputs DIR --save DIR --metrics-file FILE \\
    --layers 12 --width 768 --heads 12 --micro-batch-size 32 --global-batch-size 128 \\
    --steps 2288 --lr 6e-4 --min-lr 6e-5 --warmup 100

fp32 weights, bf16 by autocast, a graph for each layer and one for the loss by torch.compile, fused AdamW,
clipping. DIR of --inputs has what export.py wrote: initial.safetensors, train.bin and held_out.bin (rows of
T + 1 uint16 tokens, in the order of the steps) and shapes.json. So this program and pretrain_gpt.py start
from the same weights and read the same batches. The same command resumes what --seconds ended (status 75).
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import STOPPED, program_parser
from benchmarks.plain_engine import PlainEngine
from benchmarks.plain_models import PlainGPT
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig


class Training:
    """Model, optimizer and data, and the step at which they are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        shapes = json.loads((options.inputs / "shapes.json").read_text())
        config = ModelConfig(
            num_layers=options.layers,
            hidden_size=options.width,
            num_attention_heads=options.heads,
            seq_length=shapes["seq_length"],
        )
        self.train, self.held_out = (
            np.memmap(options.inputs / f"{name}.bin", np.uint16, "r").reshape(-1, config.seq_length + 1)
            for name in ("train", "held_out")
        )
        if len(self.train) < options.steps * options.global_batch_size:
            sys.exit(
                f"plain.py: --steps {options.steps} needs more rows than {len(self.train)}; export them again"
            )
        model = PlainGPT(config, shapes["vocabulary"])
        model.load_state_dict(load_file(options.inputs / "initial.safetensors"))
        model.residual = torch.bfloat16 if options.bf16_residual else None
        settings = OptimizerConfig(weight_decay=0.1, adam_beta2=0.95)
        self.engine = PlainEngine(
            model.to(self.device), settings, bf16=not options.fp32, compiled=options.compile
        )
        self.step = 0
        if (options.save / "state.safetensors").exists():
            self.load()

    def rows(self, rows: np.ndarray) -> Tensor:
        """(B, T + 1) uint16 -> int64 on the device."""
        tokens = torch.from_numpy(rows.astype(np.int64))
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True)

    def learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to the floor."""
        options = self.options
        if self.step <= options.warmup:
            return options.lr * self.step / options.warmup
        done = (self.step - options.warmup) / (options.steps - options.warmup)
        return options.min_lr + 0.5 * (math.cos(math.pi * done) + 1) * (options.lr - options.min_lr)

    def take_step(self) -> tuple[float, float, float]:
        """Train on the next global batch: its loss, the norm of the gradient, and the rate."""
        size, micro = self.options.global_batch_size, self.options.micro_batch_size
        rate = self.learning_rate()
        total = torch.zeros((), device=self.device)
        first = self.step * size
        for start in range(first, first + size, micro):
            rows = self.rows(self.train[start : start + micro])
            total += self.engine.accumulate(rows, index=0, micro_batches=size // micro) / (size // micro)
        norm = self.engine.step(rate).norm
        self.step += 1
        return total.item(), norm.item(), rate

    def evaluate(self) -> float:
        """The mean loss of the held-out rows."""
        micro, total = self.options.micro_batch_size, 0.0
        for start in range(0, len(self.held_out), micro):
            rows = self.rows(self.held_out[start : start + micro])
            total += self.engine.evaluate(rows).item() * len(rows)
        return total / len(self.held_out)

    def save(self) -> None:
        """Write the step, weights and moments."""
        self.options.save.mkdir(parents=True, exist_ok=True)
        tensors = {"step": torch.tensor(self.step)}
        for name, parameter in self.engine.model.named_parameters():
            tensors[f"weight.{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = self.engine.adamw.state[parameter][moment]
        partial = self.options.save / "partial"
        save_file(tensors, partial)
        os.replace(partial, self.options.save / "state.safetensors")

    def load(self) -> None:
        """Continue from what `save` wrote."""
        tensors = load_file(self.options.save / "state.safetensors")
        self.step = int(tensors["step"])
        for name, parameter in self.engine.model.named_parameters():
            parameter.data.copy_(tensors[f"weight.{name}"])
            moments = {each: tensors[f"{each}.{name}"].to(self.device) for each in ("exp_avg", "exp_avg_sq")}
            step = torch.tensor(float(self.step), device=self.device)
            self.engine.adamw.state[parameter] = {"step": step, **moments}


def train(training: Training, started: float) -> int:
    """Take the steps and write the metrics; return the exit status."""
    options = training.options
    tokens = options.global_batch_size * (training.train.shape[1] - 1)
    with options.metrics_file.open("a", buffering=1) as file:
        while training.step < options.steps:
            before = time.perf_counter()
            loss, norm, rate = training.take_step()
            elapsed = time.perf_counter() - before
            record = {
                "iteration": training.step,
                "consumed_samples": training.step * options.global_batch_size,
                "lm_loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "elapsed_ms": 1000 * elapsed,
                "tokens_per_second": tokens / elapsed,
            }
            if training.device.type == "cuda":
                record["memory_peak_bytes"] = torch.cuda.max_memory_allocated()
            file.write(json.dumps(record) + "\n")
            if training.step % options.eval_interval == 0 or training.step == options.steps:
                valid = {"iteration": training.step, "valid_loss": training.evaluate()}
                file.write(json.dumps(valid) + "\n")
                print(
                    f"plain, step {training.step}: loss {loss:.4f}, held-out {valid['valid_loss']:.4f}",
                    flush=True,
                )
            if training.step < options.steps and time.monotonic() - started > options.seconds:
                training.save()
                return STOPPED
    training.save()
    return 0


def main() -> None:
    started = time.monotonic()
    parser = program_parser(__doc__)
    for flag in ("--inputs", "--save", "--metrics-file"):
        parser.add_argument(flag, type=Path, required=True)
    for flag in ("--layers", "--width", "--heads", "--micro-batch-size", "--global-batch-size", "--steps"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--lr", "--min-lr"):
        parser.add_argument(flag, type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True, help="steps")
    parser.add_argument("--eval-interval", type=int, default=100, help="steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="save and exit after as many")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--fp32", action="store_true", help="without autocast")
    parser.add_argument("--bf16-residual", action="store_true", help="what all layers add to, in bf16")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    if options.global_batch_size % options.micro_batch_size:
        parser.error(f"--micro-batch-size {options.micro_batch_size} must divide --global-batch-size")
    sys.exit(train(Training(options), started))


if __name__ == "__main__":
    main()
