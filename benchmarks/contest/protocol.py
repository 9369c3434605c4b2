"""What every contestant shares: its command line, weights, data, timed steps and report.

A contestant is a program of its own that says how it takes one optimizer step. All of them start from the
same weights (drawn by name, as megatron_zpp draws them), train on the same tokens, which do not change from
step to step, and use the same optimizer with the same clipping and the same warm-up. Without a warm-up the
first steps overshoot, and amplify every rounding: losses then say nothing. With it they agree but for the
formats, and the report has them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import program_parser
from benchmarks.plain_models import PlainGPT, PlainLlama, model_arguments, model_of
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.model.gpt import GPT

SEED = 1
ADAMW = OptimizerConfig()
MUON = OptimizerConfig(  # QKV as one matrix, which peers cannot split
    optimizer="muon",
    muon_momentum=0.95,
    muon_nesterov=True,
    muon_no_split_qkv=True,
    muon_extra_scale_factor=0.2,
)
_LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
_NAMES = {  # PlainGPT's modules, and ours that hold the same parameters
    "norm1": "attention_norm",
    "qkv": "attention.qkv",
    "out": "attention.output",
    "norm2": "mlp_norm",
    "up": "mlp.input",
    "gate_up": "mlp.input",
    "down": "mlp.output",
}

# Takes micro-batches of (B, T + 1) tokens and a learning rate; returns the mean loss of this rank.
Step = Callable[[Sequence[Tensor], float], Tensor]


@dataclass(frozen=True)
class Rank:
    """This process, its device and its options."""

    options: argparse.Namespace
    rank: int
    world_size: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether the compute runs on a GPU."""
        return self.device.type == "cuda"

    @property
    def config(self) -> ModelConfig:
        """The model, without dropout."""
        return model_of(self.options, hidden_dropout=0.0, attention_dropout=0.0)


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the driver and of every contestant."""
    model_arguments(parser)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each round")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--lr-warmup-iters", type=int, default=50)


def contestant_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a contestant, to which it adds its own flags."""
    parser = program_parser(description)
    shape_arguments(parser)
    parser.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    parser.add_argument("--report", type=Path, required=True)
    return parser


def join(options: argparse.Namespace) -> Rank:
    """Join the ranks that torchrun started, with NCCL on GPUs and gloo on CPUs."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return Rank(options, rank, world_size, device)


def plain_model(
    config: ModelConfig, vocab_size: int, device: torch.device, seed: int = SEED
) -> PlainGPT | PlainLlama:
    """The peers' model, whole and in fp32, with the initial weights of ours.

    Generators of another kind of device draw other numbers.
    """
    kind = PlainLlama if config.position_embedding_type == "rope" else PlainGPT
    with torch.device("meta"):
        ours = GPT(config, vocab_size)
    with device:
        model = kind(config, vocab_size)
    if ours.config.embedding_rows(vocab_size) != vocab_size:
        raise ValueError(f"--vocab-size {vocab_size}: must not need padding, which the peers' model has not")
    for name, parameter in model.named_parameters():
        ours.initialize_parameter(_our_name(name), parameter.data, seed)
    return model


def _our_name(name: str) -> str:
    """The name in our GPT of a parameter of the peers' model."""
    *modules, last = name.split(".")
    if modules[0] == "blocks":
        return f"layers.{modules[1]}.{_NAMES[modules[2]]}.{last}"
    return f"head.{name}" if modules[0] in ("norm", "output") else f"embedding.{name}"


def compile_plain(model: PlainGPT | PlainLlama) -> None:
    """Compile a graph per layer, and one for the loss."""
    for block in model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def muon_matrices(model: PlainGPT | PlainLlama) -> list[nn.Parameter]:
    """What Muon trains."""
    return [each for each in model.blocks.parameters() if each.ndim == 2]


def plain_adamw(
    model: PlainGPT | PlainLlama, on_gpu: bool, ours: OptimizerConfig = ADAMW, *, beside_muon: bool = False
) -> torch.optim.AdamW:
    """Torch's AdamW with the settings of ours, but the rate: matrices decay, biases and norms do not."""
    others = {id(each) for each in muon_matrices(model)} if beside_muon else set()
    parameters = [each for each in model.parameters() if id(each) not in others]
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": ours.weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (ours.adam_beta1, ours.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=ours.adam_eps, fused=on_gpu or None)


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """That of a step, counted from 0, in or after the linear warm-up."""
    return options.lr * min(1.0, (step + 1) / max(1, options.lr_warmup_iters))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def report(rank: Rank, step: Step) -> None:
    """Take the steps; rank 0 writes losses, times, peak memory and bytes over loopback to --report."""
    options, batches = rank.options, _micro_batches(rank)
    losses, seconds_to_first = [], time.perf_counter()
    losses.append(step(batches, learning_rate(options, 0)))
    _synchronize(rank)
    seconds_to_first = time.perf_counter() - seconds_to_first
    losses += [step(batches, learning_rate(options, number)) for number in range(1, options.warmup)]
    mallocs = 0
    if rank.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        mallocs = torch.cuda.memory_stats()["num_device_alloc"]
    _synchronize(rank)
    dist.barrier()
    sent, clock, started = _loopback_bytes(), _Clock(rank.on_gpu), time.perf_counter()
    for number in range(options.warmup, options.warmup + options.steps):
        losses.append(step(batches, learning_rate(options, number)))
        clock.tick()
    _synchronize(rank)
    wall = 1000 * (time.perf_counter() - started)
    mine: dict[str, Any] = {"wall_ms": round(wall / options.steps, 3), "step_ms": clock.intervals()}
    if rank.on_gpu:
        mine["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        mine["mallocs_in_timed_steps"] = torch.cuda.memory_stats()["num_device_alloc"] - mallocs
    dist.barrier()
    sent = _loopback_bytes() - sent
    ranks: list[Any] = [None] * rank.world_size
    dist.all_gather_object(ranks, mine)
    mean = torch.stack(losses).float()
    dist.all_reduce(mean)
    slowest = max(ranks, key=lambda each: each["wall_ms"])
    if rank.rank == 0:
        figures = {
            **slowest,
            "of_ranks_ms": [each["wall_ms"] for each in ranks],
            "loopback_bytes_per_step": sent // options.steps,
            "seconds_to_first_step": round(seconds_to_first, 1),
            "losses": [round(loss, 5) for loss in (mean / rank.world_size).tolist()],
        }
        partial = options.report.with_suffix(".partial")
        partial.write_text(json.dumps(figures))
        os.replace(partial, options.report)
    dist.barrier()


def _micro_batches(rank: Rank) -> list[Tensor]:
    """(B, T + 1) random tokens per micro-batch, different on each rank, on its device."""
    options = rank.options
    draw = torch.Generator().manual_seed(rank.rank)
    shape = (options.micro_batches, options.micro_batch_size, options.seq_length + 1)
    return list(torch.randint(options.vocab_size, shape, generator=draw).to(rank.device))


class _Clock:
    """Times each step without making the host wait: GPU events, or the host's clock on CPUs."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._ticks: list[Any] = []  # events, or seconds
        self.tick()

    def tick(self) -> None:
        """End a step."""
        if self._on_gpu:
            self._ticks.append(torch.cuda.Event(enable_timing=True))
            self._ticks[-1].record()
        else:
            self._ticks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Milliseconds of the steps; the last one must have ended."""
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        if self._on_gpu:
            return [round(first.elapsed_time(last), 3) for first, last in pairs]
        return [round(1000 * (last - first), 3) for first, last in pairs]


def _synchronize(rank: Rank) -> None:
    if rank.on_gpu:
        torch.cuda.synchronize()


def _loopback_bytes() -> int:
    """Bytes sent over loopback, the only link of emulated nodes, by the kernel's counter."""
    return int(_LOOPBACK.read_text()) if _LOOPBACK.exists() else 0
