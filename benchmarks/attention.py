"""Times attention kernels and training steps, with and without document masks.

For heads as those of 345M, 1.3B, 2.7B and 6.7B, forward and backward of each --attention-backend that runs,
on as many samples as hold --tokens: milliseconds, and TFLOP/s of the products that causal attention needs,
the backward 2.5 times the forward. With documents of a quarter of a sample on average only products inside a
document count. Then whole training steps, with all three document masks and with none, compiled on
a GPU. In bf16 without dropout; on CPUs in fp32. Every time is the best of --rounds, in which all
contestants take turns.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import numpy as np
import torch

from benchmarks.common import RESULTS, write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.options import Options, option, option_error, parse_options
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.data.documents import as_tensors, masked_samples
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.samples import Epochs
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import AttentionKernel, check_runs, choose_attention
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.masks import CAUSAL
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.zero.engine import Batch, ZeroEngine

VOCABULARY, EOD = 50_304, 0
BACKENDS = ("auto", "math", "efficient", "flash", "cudnn", "flash3")
MASKS = DataConfig(mock_data=True, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """attention benchmark"""

    shapes: tuple[str, ...] = option(("16x64", "16x128", "32x80", "32x128"), "Heads × width of a head.")
    seq_lengths: tuple[int, ...] = option((1024, 2048), "Tokens of a sample.", at_least=8)
    tokens: int = option(16384, "Tokens of a call.", at_least=8)
    step_preset: str = option("345m", "Model of the training steps.")
    step_layers: int | None = option(None, "Fewer layers than it has.", at_least=1)
    step_hidden_size: int | None = option(None, "A narrower model.", at_least=1)
    step_seq_length: int = option(1024, "Tokens of a sample of the steps.", at_least=8)
    micro_batch_size: int = option(16, "Samples of a step.", at_least=1)
    calls: int = option(20, "Calls that are timed together; steps are a quarter as many.", at_least=1)
    rounds: int = option(5, "Times that each is timed.", at_least=1)
    output: Path = option(RESULTS, "Directory of the result.")

    def check(self) -> None:
        """Raises ValueError for an invalid shape."""
        for shape in self.shapes:
            if len(parts := shape.split("x")) != 2 or not all(part.isdigit() and int(part) for part in parts):
                raise option_error("--shapes", shape, "must be heads × width, as in 16x64")


@dataclass(frozen=True)
class Texts:
    """Random tokens, of which one in a quarter of a sample is an end of document."""

    seq_length: int
    windows_per_epoch = None

    def epochs(self, samples: int) -> list[Epochs]:
        """See Samples."""
        return []

    def describe(self) -> str:
        """See Samples."""
        return "random tokens"

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """(len,) integers to (len, S + 1) int64."""
        tokens = MockDataset(self.seq_length, VOCABULARY - 1, 1).batch(indices) + 1
        tokens[MockDataset(self.seq_length, self.seq_length // 4, 2).batch(indices) == 0] = EOD
        return tokens


def batch_of(samples: int, seq_length: int, masked: bool, device: torch.device) -> Batch:
    """A micro-batch on the device."""
    texts, indices = Texts(seq_length), np.arange(samples)
    batch = as_tensors((masked_samples(texts, MASKS, EOD) if masked else texts).batch(indices))
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    return tuple(part if part is None else part.to(device) for part in batch)


def best_milliseconds(
    contestants: dict[str, Callable[[], object]], rounds: int, calls: int, device: torch.device
) -> dict[str, float]:
    """The shortest mean time of a call of each contestant."""

    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    best = dict.fromkeys(contestants, math.inf)
    for round_number in range(rounds + 1):  # the first warms up
        for name, call in contestants.items():
            started = finished()
            for _ in range(calls if round_number else 2):
                call()
            if round_number:
                best[name] = min(best[name], 1000 * (finished() - started) / calls)
    return best


class _Case(TypedDict):
    masked: bool
    head_width: int
    dropout: float
    dtype: torch.dtype
    device: torch.device


def kernel_rows(
    shape: str, seq_length: int, settings: Settings, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each kernel, with documents and without; `refused` says why one has no figures."""
    heads, width = map(int, shape.split("x"))
    samples = max(1, settings.tokens // seq_length)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    qkv = torch.randn(
        samples, seq_length, 3, heads, width, dtype=dtype, device=device, generator=generator
    ).requires_grad_()
    ends = batch_of(samples, seq_length, True, device)[3]
    assert ends is not None
    lengths = {False: torch.full((samples,), seq_length), True: ends.diff().cpu()}

    def call(kernel: AttentionKernel, masked: bool) -> None:
        mask = kernel.documents(ends, qkv) if masked else CAUSAL
        q, k, v = qkv.unbind(2)
        mixed = kernel(q, k, v, 0.0, mask)
        torch.autograd.grad(mixed, qkv, mixed)

    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], object]] = {}
    for backend in BACKENDS:
        for masked in (False, True):
            row: dict[str, Any] = {
                "heads": shape,
                "seq_length": seq_length,
                "samples": samples,
                "backend": backend,
            }
            rows.append(row | {"documents": masked})
            case = _Case(masked=masked, head_width=width, dropout=0.0, dtype=dtype, device=device)
            try:
                kernel = choose_attention(backend, **case)
                check_runs(kernel, backend, (seq_length,), **case)
            except ValueError as refused:
                rows[-1]["refused"] = str(refused)
                continue
            rows[-1]["kernel"] = kernel.describe() or "torch's choice"
            calls[str(len(rows) - 1)] = partial(call, kernel, masked)
    for number, milliseconds in best_milliseconds(calls, settings.rounds, settings.calls, device).items():
        row = rows[int(number)]
        products = 2 * heads * width * int(lengths[row["documents"]].square().sum())  # half of 4: causal
        row["milliseconds"] = round(milliseconds, 4)
        row["tflops"] = round(3.5 * products / milliseconds / 1e9, 1)
    return rows


def step_figures(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Tokens per second of training steps with documents and without, and their ratio."""
    smaller: dict[str, Any] = {"num_layers": settings.step_layers, "hidden_size": settings.step_hidden_size}
    config = ModelConfig(
        model_preset=settings.step_preset,
        seq_length=settings.step_seq_length,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **smaller,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    operations = load_operations("cuda", require_kernels=True, say=print) if device.type == "cuda" else None
    kernels, engines = {}, []
    steps: dict[str, Callable[[], object]] = {}

    def step(engine: ZeroEngine, batch: Batch) -> None:
        engine.accumulate(batch, index=0, micro_batches=1)
        engine.step(1e-4)

    for masked in (False, True):
        kernel = choose_attention(
            "auto", masked=masked, head_width=config.kv_channels, dropout=0.0, dtype=dtype, device=device
        )
        with torch.device("meta"):
            model = GPT(config, VOCABULARY, parts=ModelComponents(attention=kernel))
        if device.type == "cuda":
            shape = (settings.micro_batch_size, config.seq_length)
            compile_parts(model, shape, print, masked=masked, on_gpu=True)
        engine = ZeroEngine(
            model,
            partial(model.initialize_parameter, seed=1),
            zero=ZeroConfig(),
            optimizer=OptimizerConfig(),
            precision=PrecisionConfig(),
            topology=Topology(),
            device=device,
            operations=operations,
        )
        engines.append(engine)
        batch = batch_of(settings.micro_batch_size, config.seq_length, masked, device)
        name = "documents" if masked else "whole"
        steps[name], kernels[name] = partial(step, engine, batch), kernel.describe()
    milliseconds = best_milliseconds(steps, settings.rounds, -(-settings.calls // 4), device)
    for engine in engines:
        engine.close()
    tokens = settings.micro_batch_size * config.seq_length
    return {
        "model": settings.step_preset,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "seq_length": config.seq_length,
        "micro_batch_size": settings.micro_batch_size,
        "kernels": kernels,
        "milliseconds": {name: round(value, 3) for name, value in milliseconds.items()},
        "tokens_per_second": {name: round(1000 * tokens / value) for name, value in milliseconds.items()},
        "rate_of_documents_over_whole": round(milliseconds["whole"] / milliseconds["documents"], 4),
    }


def main() -> None:
    settings = parse_options(Settings, "attention.py", __doc__, sys.argv[1:])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    figures = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "kernels": [
            row
            for shape in settings.shapes
            for seq_length in settings.seq_lengths
            for row in kernel_rows(shape, seq_length, settings, device)
        ],
        "step": step_figures(settings, device),
    }
    write_result("attention", figures, settings.output)


if __name__ == "__main__":
    run_tool("attention.py", main)
