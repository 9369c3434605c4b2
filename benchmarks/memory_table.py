"""Model-state memory of each rank, from the formula with which the tests check the engine.

python benchmarks/memory_table.py   prints a table
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import refuse_options

SIZES = {"1.3B": 1.3e9, "7.5B": 7.5e9, "18B": 18.4e9, "175B": 175e9, "1T": 1e12}
RANKS = (8, 64, 256, 1024)
PARAMETER_BYTES = 2  # per parameter, as it computes
OPTIMIZER_BYTES = 12  # per parameter: fp32 master weight, first moment, second moment


def model_state_bytes(parameters: int, ranks: int, stage: int, *, gradient_bytes: int = 4) -> float:
    """Bytes of model states on each rank, without padding and buffers (ZeRO paper, section 5 and figure 1).

    Parameters as they compute take 2 bytes, accumulated gradients 4 here and 2 in the paper.
    """
    shares = [ranks if stage >= first else 1 for first in (3, 2, 1)]  # parameters, gradients, optimizer
    costs = (PARAMETER_BYTES, gradient_bytes, OPTIMIZER_BYTES)
    return parameters * sum(cost / share for cost, share in zip(costs, shares, strict=True))


def main() -> None:
    """Gigabytes per rank, with gradients accumulated in fp32 as here, and the paper's with fp16 gradients."""
    refuse_options(__doc__)
    rows = []
    for size, parameters in SIZES.items():
        for ranks in RANKS:
            gigabytes = [round(model_state_bytes(int(parameters), ranks, s) / 1e9, 2) for s in range(4)]
            rows.append(
                {"parameters": size, "ranks": ranks, **{f"stage_{s}": g for s, g in enumerate(gigabytes)}}
            )
    print("| parameters | ranks |" + "".join(f" stage {stage} |" for stage in range(4)))
    print("| --- " * 6 + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
