"""What --dry-run predicts, beside what was measured here and what the ZeRO++ paper published; needs no GPU.

python benchmarks/plan.py   writes results/plan.json and prints the tables of docs/internals/planner.md

plan_rows.py says how the measurements are compared, plan_tensor.py how those of ranks that share layers are,
plan_paper.py how the paper's figures are, and plan_published.py how published runs on H100s are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import refuse_options, write_result
from benchmarks.plan_paper import our_rows, published_rows
from benchmarks.plan_published import h100_rows
from benchmarks.plan_rows import (
    Row,
    format_rows,
    h200_rows,
    nvlink_rows,
    shape_rows,
    slow_link_rows,
    socket_rows,
)
from benchmarks.plan_tensor import tensor_rows


def tables() -> dict[str, list[str]]:
    """The tables of docs/internals/planner.md: the lines of each by its name."""
    gpus = [
        f"| {row['run']} | {row['gib']:.2f} | {row['measured_gib']:.2f} | {_times(row)} |"
        for row in h200_rows()
    ]
    sockets = [
        f"| {row['nccl']} | {row['micro_batches']} | {row['run']} | "
        f"{row['gib']:.2f} | {row['measured_gib']:.2f} | {_times(row)} |"
        for row in socket_rows()
    ]
    h100s = [
        f"| {row['model'].upper()} | {row['tokens']:,} | "
        f"{row['micro_batch_size']} × {row['micro_batches']} | {row['measured_mfu']:.1f} | "
        f"{row['mfu']:.1f} | {_off(row['measured_mfu'], row['mfu'])} |"
        for row in h100_rows()
    ]
    tensor = [
        f"| {row['run']} | {row['gib']:.2f} | {row['measured_gib']:.2f} | "
        f"{row['share']:.3f} | {_times(row)} |"
        for row in tensor_rows()
    ]
    return {
        "gpus": gpus,
        "tensor": tensor,
        "sockets": sockets,
        "h100s": h100s,
    }


def _times(row: Row) -> str:
    off = "fitted" if row["fitted"] else _off(row["milliseconds"], row["measured_ms"])
    return f"{row['milliseconds']:.1f} | {row['measured_ms']:.1f} | {off}"


def _off(planned: float, measured: float) -> str:
    return format(planned / measured - 1, "+.1%")


def main() -> None:
    """Write the rows, and print them as tables of the documentation."""
    refuse_options(__doc__)
    figures = {
        "h200": h200_rows(),
        "tensor_h100": tensor_rows(),
        "sockets": socket_rows(),
        "nvlink_h100": nvlink_rows(),
        "one_h200": shape_rows(),
        "published_h100": h100_rows(),
        "slow_link": slow_link_rows(),
        "zeropp_paper_18b": published_rows(),
        "ours_18b": our_rows(),
        "formats_1.3b": format_rows(),
    }
    write_result("plan", figures)
    for name, lines in tables().items():
        print("", name, *lines, sep="\n")


if __name__ == "__main__":
    main()
