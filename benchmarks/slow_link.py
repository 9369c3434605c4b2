"""Each technique of ZeRO++ over a slow link, between emulated nodes on CPUs.

python benchmarks/slow_link.py [--link-rate 200]   (needs root, for network namespaces)
python benchmarks/slow_link.py --accumulation 1 4 16 --grids 2x1 2x2 3x2   gradients accumulated inside nodes
python benchmarks/slow_link.py --runs stage_3 four_bits --name slow_link_four_bits   some runs

Prediction, before anything is measured: the bytes that a step sends between nodes follow from the layouts of
the units, and every node sends an equal part of them, so a step takes at least that part divided by the
link's rate. If a step waits for the link, the measured time is close to this bound; otherwise the compute
decides. `counted_over_ledger` compares the bytes that the kernel counted in the whole run with the ledger's.
Ranks join and time their links before they train, so the bytes that a run of one step of plain stage 3 sends
beyond its ledger are subtracted. With --accumulation, `bytes_per_parameter` are the bytes sent by all nodes
in a step / parameters / (nodes - 1), and the time of a step is not limited by --link-rate.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.zero import GRADIENT_BLOCK, ROTATED_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.flat_layout import FlatLayout

ROOT = Path(__file__).resolve().parents[1]
NODES, RANKS_OF_A_NODE, VOCAB = 2, 2, 256
SHAPE: dict[str, Any] = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 64}
QWZ, HPZ, QGZ = "--zero-quantized-weights", "--zero-hpz-partition-size", "--zero-quantized-gradients"
ACCUMULATE = "--zero-gradient-partition-size"
FOUR_BITS = [
    *(QWZ, "--zero-quantized-weights-format", "delta4", HPZ, "auto"),
    *(QGZ, "--zero-quantized-gradients-format", "rotated4"),
]
CONTESTANTS = {
    "stage_3": [],
    "qwz": [QWZ],
    "hpz": [HPZ, "auto"],
    "qgz": [QGZ],
    "all_on": [QWZ, HPZ, "auto", QGZ],
    "four_bits": FOUR_BITS,
}
ACCUMULATING = {
    "hpz": [HPZ, "auto"],
    "hpz_accumulated": [HPZ, "auto", ACCUMULATE, "auto"],
    "all_on": [QWZ, HPZ, "auto", QGZ],
    "all_on_accumulated": [QWZ, HPZ, "auto", QGZ, ACCUMULATE, "auto"],
    "four_bits_accumulated": [*FOUR_BITS, ACCUMULATE, "auto"],
}
WARMUP = 2  # steps


@dataclass(frozen=True)
class Grid:
    """Nodes, ranks per node, and micro-batches per step."""

    nodes: int = NODES
    local: int = RANKS_OF_A_NODE
    micro_batches: int = 1


def layouts(flags: list[str], grid: Grid) -> list[FlatLayout]:
    """The layouts of the model's units."""
    with torch.device("meta"):
        model = GPT(ModelConfig(**SHAPE, hidden_dropout=0.0, attention_dropout=0.0), VOCAB)
    block = WEIGHT_BLOCK if QWZ in flags else GRADIENT_BLOCK if QGZ in flags else 1
    return layouts_of(model.units(), grid.nodes * grid.local, ZeroConfig().shard_multiple, block)


def predicted_bytes(flags: list[str], grid: Grid) -> int:
    """Bytes sent between nodes by all ranks in one step, in bf16 or as codes.

    Each rank sends its shard of a gather to its cross-node ranks, once per step with hpZ. A plain reduction
    sends the node's fp32 sum. On nodes of one rank it sends gradients, in bf16, or in fp32 if they were
    accumulated.
    """
    total, others, several = 0, grid.nodes - 1, grid.local > 1
    accumulated = ACCUMULATE in flags and grid.micro_batches > 1
    for layout, units in Counter(layouts(flags, grid)).items():
        shard = layout.shard_numel
        in_slots = min(units, 2)  # still there from the pass before
        gathers = units
        if HPZ not in flags:
            gathers += (2 * grid.micro_batches - 1) * (units - in_slots)
        message = QuantFormat("int8", WEIGHT_BLOCK).message_bytes(shard) if QWZ in flags else 2 * shard
        reduced = (4 if several or accumulated else 2) * shard
        if "delta4" in flags:
            message = LloydMaxFormat(4, WEIGHT_BLOCK).message_bytes(shard)
        if "rotated4" in flags:
            reduced = LloydMaxFormat(4, ROTATED_BLOCK).message_bytes(shard)
        elif QGZ in flags:
            reduced = QuantFormat("int4", GRADIENT_BLOCK).message_bytes(shard)
        reductions = units * (1 if ACCUMULATE in flags else grid.micro_batches)
        total += layout.ranks * others * (gathers * message + reductions * reduced)
    return total


def measure(
    flags: list[str], grid: Grid, rate: int | None, steps: int, start_up: float = 0
) -> dict[str, float]:
    """Seconds per step (median after the warm-up), bytes between nodes per step, and counters over ledger.

    `start_up`: bytes that a run sends between nodes before it trains.
    """
    seconds, sent, counted = run(flags, grid, rate, WARMUP + steps)
    return {
        "seconds": round(statistics.median(seconds[WARMUP:]), 4),
        "bytes_between_nodes": sent[-1],
        "counted_over_ledger": round((counted - start_up) / sum(sent), 4),
    }


def start_up_bytes(grid: Grid) -> int:
    """Bytes that the kernel counts in a run of one step, beyond its ledger."""
    _, sent, counted = run([], grid, None, 1)
    return counted - sum(sent)


def run(
    flags: list[str], grid: Grid, rate: int | None, iterations: int
) -> tuple[list[float], list[int], int]:
    """Seconds of each step, bytes between nodes of each by the ledger, and of the whole run by the kernel."""
    shape = [word for key, value in SHAPE.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        command = ["launch/emulate_nodes.sh", "--nodes", grid.nodes, "--ranks-per-node", grid.local]
        command += ["--link-rate", f"{rate}mbit"] if rate else []
        command += ["--", "pretrain_gpt.py", *shape, "--mock-data", "--tokenizer-type", "NullTokenizer"]
        command += ["--vocab-size", VOCAB - 1, "--attention-dropout", 0, "--hidden-dropout", 0, "--bf16"]
        command += ["--global-batch-size", grid.nodes * grid.local * grid.micro_batches]
        command += ["--micro-batch-size", 1, "--lr", 1e-3, "--num-workers", 0, "--log-interval", 1]
        command += ["--eval-iters", 0, "--train-iters", iterations, "--metrics-file", metrics]
        command += ["--zero-stage", 3, *flags]
        environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    sent = [record["inter_node_bytes"] for record in records]
    line = next(line for line in done.stdout.splitlines() if line.startswith("bytes that left each node:"))
    counted = sum(map(int, re.findall(r"node \d+ (\d+)", line)))
    return [record["elapsed_ms"] / 1000 for record in records], sent, counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link-rate", type=int, default=200, help="Mbit/s of a node's link, each direction.")
    parser.add_argument("--steps", type=int, default=8, help="Timed steps.")
    parser.add_argument("--accumulation", type=int, nargs="*", default=[], help="Micro-batches per step.")
    parser.add_argument(
        "--grids", nargs="+", default=["2x2"], help="Nodes x ranks per node, to accumulate on."
    )
    parser.add_argument("--runs", nargs="+", help="Some runs instead of all; needs --name.")
    parser.add_argument("--name", help="Of the result.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = ACCUMULATING if options.accumulation else CONTESTANTS
    options.runs, partial = options.runs or list(runs), options.runs is not None
    if unknown := [name for name in options.runs if name not in runs]:
        parser.error(f"--runs {unknown[0]}: must be one of {', '.join(runs)}")
    if partial and not options.name:
        parser.error("--runs: needs --name, because the result lacks the other runs")
    if not options.accumulation and "stage_3" not in options.runs:
        parser.error(f"--runs {' '.join(options.runs)}: needs stage_3, with which the others are compared")
    settings = {**SHAPE, "vocab": VOCAB, "dtype": "bf16", "warmup": WARMUP, "steps": options.steps}
    if options.accumulation:
        sizes = [map(int, grid.split("x")) for grid in options.grids]
        grids = [Grid(n, local, count) for n, local in sizes for count in options.accumulation]
        figures, name = accumulation(grids, options), "slow_link_accumulation"
    else:
        figures, name = techniques(options), "slow_link"
        settings |= {"nodes": NODES, "ranks_of_a_node": RANKS_OF_A_NODE, "link_mbit": options.link_rate}
    write_result(options.name or name, {"settings": settings, **figures}, options.output)
    columns = list(next(iter(figures.values())))
    print("", *["run", *columns], "", sep=" | ")
    print("", *["---"] * (1 + len(columns)), "", sep=" | ")
    for name, figure in figures.items():
        print("", name, *[figure[column] for column in columns], "", sep=" | ")


def techniques(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of each technique and of all together, one micro-batch, with and without a link limit."""
    figures, grid = {}, Grid()
    contestants = {name: CONTESTANTS[name] for name in options.runs}
    for name, flags in contestants.items():
        nbytes = predicted_bytes(flags, grid)
        seconds = nbytes / NODES * 8 / (options.link_rate * 1e6)
        figures[name] = {"predicted_bytes": nbytes, "predicted_seconds": round(seconds, 4)}
    print(json.dumps(figures, indent=2), flush=True)
    start_up = start_up_bytes(grid)
    for name, flags in contestants.items():
        figures[name] |= measure(flags, grid, options.link_rate, options.steps, start_up)
        figures[name]["seconds_without_a_limit"] = measure(flags, grid, None, options.steps)["seconds"]
        print(name, figures[name], flush=True)
    plain = figures["stage_3"]
    for figure in figures.values():
        figure["rate_over_stage_3"] = round(plain["seconds"] / figure["seconds"], 3)
        figure["bytes_over_stage_3"] = round(figure["bytes_between_nodes"] / plain["bytes_between_nodes"], 4)
    return figures


def accumulation(grids: list[Grid], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Bytes of each run of ACCUMULATING that was asked for, on each grid."""
    figures: dict[str, dict[str, float]] = {}
    for grid in grids:
        start_up = start_up_bytes(grid)
        for name in options.runs:
            flags = ACCUMULATING[name]
            key = f"{grid.nodes}x{grid.local}, {grid.micro_batches} micro-batches, {name}"
            figures[key] = {"predicted_bytes": predicted_bytes(flags, grid)}
            figures[key] |= measure(flags, grid, None, options.steps, start_up)
            elements = sum(layout.numel for layout in layouts(flags, grid))
            per_parameter = figures[key]["bytes_between_nodes"] / elements / (grid.nodes - 1)
            figures[key]["bytes_per_parameter"] = round(per_parameter, 4)
            print(key, figures[key], flush=True)
    return figures


if __name__ == "__main__":
    main()
