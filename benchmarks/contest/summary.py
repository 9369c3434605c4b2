"""Medians, intervals and tables of the rounds that benchmarks/zero_speed.py keeps."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.flops import flops_per_token

PEERS = ("fsdp2", "deepspeed")  # families; a name begins with its family
_LOSS_TOLERANCE = 0.02  # between bf16 and quantised runs; a different computation exceeds it at once


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free 95% interval of the median, from the order statistics.

    Below six values it is their range, which covers less.
    """
    ordered, count = sorted(values), len(values)
    low, below = 0, 0.5**count  # the chance of so few values below the median
    while low < (count - 1) // 2 and below + math.comb(count, low + 1) * 0.5**count <= 0.025:
        low += 1
        below += math.comb(count, low) * 0.5**count
    return ordered[low], ordered[count - 1 - low]


def summarise(figures: dict[str, Any]) -> None:
    """Add to each contestant its figures over all rounds, and the rate of ours over the strongest peers."""
    rows = {name: row for name, row in figures["contestants"].items() if row.get("rounds")}
    settings = figures["settings"]
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    config = ModelConfig(model_preset=settings["preset"], **{name: settings[name] for name in shape})
    tokens = settings["micro_batch_size"] * settings["micro_batches"] * settings["seq_length"]
    flops = tokens * flops_per_token(config, settings["vocab_size"])
    for row in rows.values():
        steps = [step for each in row["rounds"] for step in each["step_ms"]]
        row["milliseconds"] = round(statistics.median(steps), 2)
        row["interval_ms"] = [round(bound, 2) for bound in median_interval(steps)]
        row["rounds_ms"] = [round(statistics.median(each["step_ms"]), 2) for each in row["rounds"]]
        row["tflops_per_gpu"] = round(flops / row["milliseconds"] / 1e9, 1)
        row["loopback_bytes_per_step"] = round(
            statistics.median(each["loopback_bytes_per_step"] for each in row["rounds"])
        )
        if "peak_gib" in row["rounds"][0]:
            row["peak_gib"] = max(each["peak_gib"] for each in row["rounds"])
    if not rows:
        return
    strongest = {
        family: min(of_family, key=lambda name: rows[name]["milliseconds"])
        for family in PEERS
        if (of_family := [name for name in rows if name.startswith(family)])
    }
    figures["strongest_peers"] = strongest
    for row in rows.values():
        for family, peer in strongest.items():
            row[f"rate_over_{family}"] = round(rows[peer]["milliseconds"] / row["milliseconds"], 3)
        row["last_loss"] = row["rounds"][-1]["losses"][-1]
        row["same_work"] = _same_work(row, rows)
    if rates := figures["links"]["rounds"]:
        figures["links"]["gigabytes_per_second"] = {
            name: {
                size: round(statistics.median(each[name][size] for each in rates), 2)
                for size in rates[0][name]
            }
            for name in rates[0]
            if isinstance(rates[0][name], dict)
        }


def _same_work(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> bool:
    """Whether its first loss is that of most contestants, which have the same weights and tokens."""
    first = row["rounds"][0]["losses"][0]
    usual = statistics.median(each["rounds"][0]["losses"][0] for each in rows.values())
    return abs(first / usual - 1) < _LOSS_TOLERANCE  # False for NaN


def tables(results: Iterable[dict[str, Any]]) -> str:
    """A table per result."""
    lines: list[str] = []
    for result in results:
        figures = result["figures"]
        lines += [*_head(figures), *_table(figures["contestants"]), ""]
    return "\n".join(lines)


def _head(figures: dict[str, Any]) -> list[str]:
    settings = figures["settings"]
    model = settings["preset"] or f"{settings['num_layers']} layers × {settings['hidden_size']}"
    batch = f"{settings['micro_batches']} × {settings['micro_batch_size']} samples per rank and step"
    shared = ", **ranks share GPUs: no measure of a network**" if figures["shared_gpu"] else ""
    shape = f"{figures['nodes']} nodes × {figures['ranks_per_node']}, {model}, {batch}{shared}"
    lines = [f"### {shape}, NCCL {figures['nccl']['name']}", ""]
    if rates := figures["links"].get("gigabytes_per_second"):
        said = ", ".join(
            f"{name.replace('_', ' ')} {' / '.join(map(str, by_size.values()))}"
            for name, by_size in rates.items()
        )
        sizes = " / ".join(next(iter(rates.values())))
        lines += [f"GB/s that a rank sends ({sizes}): {said}.", ""]
    return lines


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Rows with the fastest first; absent and failed contestants come last."""
    lines = [
        "| contestant | ms | 95% of the median | rounds | over best FSDP2 | over best DeepSpeed | GiB "
        "| GB on loopback | last loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows.values(), key=lambda row: row.get("milliseconds", math.inf)):
        if "milliseconds" not in row:
            why = row.get("absent") or row.get("failed") or "not yet run"
            lines.append(f"| {row['title']} | {why.splitlines()[0][:240]} |")
            continue
        cells = [
            row["title"] + ("" if row["same_work"] else " **(its first loss is another)**"),
            f"{row['milliseconds']:.1f}",
            "–".join(f"{bound:.1f}" for bound in row["interval_ms"]),
            " ".join(f"{each:.1f}" for each in row["rounds_ms"]),
            *(str(row.get(f"rate_over_{family}", "")) for family in PEERS),
            str(row.get("peak_gib", "")),
            f"{row['loopback_bytes_per_step'] / 1e9:.2f}",
            f"{row['last_loss']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
