"""Model-state memory of each rank on paper, from the formulas that the tests hold the engine to.

python benchmarks/memory_table.py   writes benchmarks/results/memory_table.json and prints a table
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import write_result
from megatron_zpp.zero.theory import model_state_bytes

SIZES = {"1.3B": 1.3e9, "7.5B": 7.5e9, "18B": 18.4e9, "175B": 175e9, "1T": 1e12}
RANKS = (8, 64, 256, 1024)
PAPER = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}  # ZeRO paper, figure 1: 7.5B on 64 GPUs, GB


def main() -> None:
    """Gigabytes a rank, with gradients accumulated in fp32 as here, and the paper's with fp16 gradients."""
    rows = []
    for size, parameters in SIZES.items():
        for ranks in RANKS:
            gigabytes = [round(model_state_bytes(int(parameters), ranks, s) / 1e9, 2) for s in range(4)]
            rows.append(
                {"parameters": size, "ranks": ranks, **{f"stage_{s}": g for s, g in enumerate(gigabytes)}}
            )
    paper = {
        f"stage_{stage}": {
            "published_gb": published,
            "formula_gb": round(model_state_bytes(7_500_000_000, 64, stage, gradient_bytes=2) / 1e9, 2),
        }
        for stage, published in PAPER.items()
    }
    write_result("memory_table", {"gigabytes_a_rank": rows, "zero_paper_7.5b_on_64_gpus": paper})
    print("\n| parameters | ranks |" + "".join(f" stage {stage} |" for stage in range(4)))
    print("| --- " * 6 + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
