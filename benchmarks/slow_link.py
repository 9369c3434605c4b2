"""Each technique of ZeRO++ over a slow link: two emulated nodes of two ranks, on CPUs.

python benchmarks/slow_link.py [--link-rate 200]   (needs root, for network namespaces)

Prediction, before anything is measured: the bytes that a step sends between nodes follow from the layouts of
the units, and a node sends half of them, so a step takes at least that half divided by the link's rate. Where
the link is what a step waits for, measured time is near it; where it is not, the compute shows. The last
column says how the bytes that the kernel counted in the whole run compare with the ledger's.
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
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import write_result
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.zero import GRADIENT_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.zero.build import layouts_of

ROOT = Path(__file__).resolve().parents[1]
NODES, RANKS_OF_A_NODE, VOCAB = 2, 2, 256
SHAPE = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 64}
QWZ, HPZ, QGZ = "--zero-quantized-weights", "--zero-hpz-partition-size", "--zero-quantized-gradients"
CONTESTANTS = {
    "stage_3": [],
    "qwz": [QWZ],
    "hpz": [HPZ, "auto"],
    "qgz": [QGZ],
    "all_on": [QWZ, HPZ, "auto", QGZ],
}
WARMUP = 2  # steps


def predicted_bytes(flags: list[str]) -> int:
    """Sent between nodes by all ranks together in one step of one micro-batch, in bf16 or as codes.

    A gather goes around a ring that crosses from node to node NODES times, and on each of its links all
    shards but one. hpZ leaves the first gather of a step. A plain reduction sends every rank its slice of
    every other rank's gradients; qgZ's nodes send each other node its slices once.
    """
    with torch.device("meta"):
        model = GPT(ModelConfig(**SHAPE, hidden_dropout=0.0, attention_dropout=0.0), VOCAB)
    ranks = NODES * RANKS_OF_A_NODE
    total = 0
    block = WEIGHT_BLOCK if QWZ in flags else GRADIENT_BLOCK if QGZ in flags else 1
    layouts = layouts_of(model.units(), ranks, ZeroConfig().shard_multiple, block)
    for layout, units in Counter(layouts).items():
        shard = layout.shard_numel
        in_slots = min(units, 2)  # the backward finds the forward's last units there
        gathers = units if HPZ in flags else 2 * units - in_slots
        message = QuantFormat("int8", WEIGHT_BLOCK).message_bytes(shard) if QWZ in flags else 2 * shard
        total += gathers * NODES * (ranks - 1) * message
        if QGZ in flags:
            total += units * ranks * (NODES - 1) * QuantFormat("int4", GRADIENT_BLOCK).message_bytes(shard)
        else:
            total += units * ranks * (ranks - RANKS_OF_A_NODE) * 2 * shard
    return total


def measure(flags: list[str], rate: int | None, steps: int) -> dict[str, float]:
    """Seconds a step (median after the warm-up), bytes between nodes a step, and counters over ledger."""
    shape = [word for key, value in SHAPE.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        command = ["launch/emulate_nodes.sh", "--nodes", NODES, "--ranks-per-node", RANKS_OF_A_NODE]
        command += ["--link-rate", f"{rate}mbit"] if rate else []
        command += ["--", "pretrain_gpt.py", *shape, "--mock-data", "--tokenizer-type", "NullTokenizer"]
        command += ["--vocab-size", VOCAB - 1, "--attention-dropout", 0, "--hidden-dropout", 0, "--bf16"]
        command += ["--micro-batch-size", 1, "--lr", 1e-3, "--num-workers", 0, "--log-interval", 1]
        command += ["--eval-iters", 0, "--train-iters", WARMUP + steps, "--metrics-file", metrics]
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
    return {
        "seconds": round(statistics.median(record["elapsed_ms"] for record in records[WARMUP:]) / 1000, 4),
        "bytes_between_nodes": sent[-1],
        "counted_over_ledger": round(counted / sum(sent), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link-rate", type=int, default=200, help="Mbit/s, each way, of a node's link.")
    parser.add_argument("--steps", type=int, default=8, help="Timed steps.")
    options = parser.parse_args()

    figures = {}
    for name, flags in CONTESTANTS.items():
        nbytes = predicted_bytes(flags)
        seconds = nbytes / NODES * 8 / (options.link_rate * 1e6)
        figures[name] = {"predicted_bytes": nbytes, "predicted_seconds": round(seconds, 4)}
    print(json.dumps(figures, indent=2), flush=True)

    for name, flags in CONTESTANTS.items():
        figures[name] |= measure(flags, options.link_rate, options.steps)
        figures[name]["seconds_without_a_limit"] = measure(flags, None, options.steps)["seconds"]
        print(name, figures[name], flush=True)
    plain = figures["stage_3"]
    for figure in figures.values():
        figure["rate_over_stage_3"] = round(plain["seconds"] / figure["seconds"], 3)
        figure["bytes_over_stage_3"] = round(figure["bytes_between_nodes"] / plain["bytes_between_nodes"], 4)

    shape = {**SHAPE, "vocab": VOCAB, "nodes": NODES, "ranks_of_a_node": RANKS_OF_A_NODE, "dtype": "bf16"}
    settings = {**shape, "link_mbit": options.link_rate, "warmup": WARMUP, "steps": options.steps}
    write_result("slow_link", {"settings": settings, **figures})
    columns = list(plain)
    print("", *["run", *columns], "", sep=" | ")
    print("", *["---"] * (1 + len(columns)), "", sep=" | ")
    for name, figure in figures.items():
        print("", name, *[figure[column] for column in columns], "", sep=" | ")


if __name__ == "__main__":
    main()
