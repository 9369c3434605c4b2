"""What --dry-run predicts, beside what was measured; needs no GPU.

python benchmarks/plan.py   prints the tables of docs/internals/planner.md, and rows that its text sums up

plan_rows.py says how measurements are compared, and plan_tensor.py how those of ranks that share layers are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import program_parser
from benchmarks.plan_rows import (
    Row,
    context_rows,
    h200_rows,
    llama_rows,
    nvlink_rows,
    shape_rows,
    socket_rows,
)
from benchmarks.plan_tensor import tensor_rows


def tables() -> dict[str, list[str]]:
    """The lines of each table, by its name."""
    return {
        "tensor ranks": [
            f"| {row['run']} | {_gib(row)} | {row['share']:.3f} | {_ms(row)}" for row in tensor_rows()
        ],
        "two H200s": [f"| {row['run']} | {_gib(row)} | {_ms(row)}" for row in h200_rows()],
        "two H100s": [f"| {row['model']} {row['run']} | {_gib(row)} | {_ms(row)}" for row in nvlink_rows()],
        "between nodes": [
            f"| {row['nccl']} | {row['micro_batches']} | {row['run']} | {_gib(row)} | {_ms(row)}"
            for row in socket_rows()
        ],
        "other models": [f"| {row['shape']} | {_gib(row)} | {_ms(row)}" for row in shape_rows()],
        "long samples": [f"| {row['run']} | {_gib(row)} | {_ms(row)}" for row in context_rows()],
        "Llama-3 8B": [f"| {row['run']} | {_gib(row)} | {_ms(row)}" for row in llama_rows()],
    }


def _gib(row: Row) -> str:
    return f"{row['gib']:.2f} | {row['measured_gib']:.2f}"


def _ms(row: Row) -> str:
    off = "fitted" if row["fitted"] else _off(row["milliseconds"], row["measured_ms"])
    return f"{row['milliseconds']:.1f} | {row['measured_ms']:.1f} | {off} |"


def _off(planned: float, measured: float) -> str:
    return format(planned / measured - 1, "+.1%")


def main() -> None:
    """Print the tables."""
    program_parser(__doc__).parse_args()
    for name, lines in tables().items():
        print("", name, *lines, sep="\n")


if __name__ == "__main__":
    main()
