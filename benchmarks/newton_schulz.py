"""Newton-Schulz by torch's products, and with the kernel that computes half of symmetric ones; on one GPU.

python benchmarks/newton_schulz.py [--shapes 8x2048x2048 2x8192x2048]

A shape is a batch of matrices, by default such as layers of GPT from 125M to 13B have. Times are medians,
TFLOP/s of whole products also where half is computed. `error` is that of singular values from torch's.
"""

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch
from torch import Tensor

from benchmarks.common import RESULTS, write_result
from megatron_zpp.zero.newton_schulz import coefficients, flops, orthogonalize_, squared

STEPS = 5
GIVEN = coefficients("quintic", STEPS)
SHAPES = [  # without a split of queries, keys and values
    *("30x768x768", "10x3072x768", "10x768x3072"),
    *("8x1024x1024", "8x2048x2048", "2x8192x2048", "2x2048x8192"),
    *("4x4096x4096", "4x5120x5120", "1x20480x5120", "1x5120x20480"),
]


def measured(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of each product and of all steps, by torch and with the kernel."""
    from triton.testing import do_bench

    from megatron_zpp.zero.fused import symmetric

    count, rows, columns = shape
    small, large = sorted((rows, columns))
    matrices = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    wide = matrices.mT if rows > columns else matrices
    gram = squared(wide) / large

    def row(function: Any, work: float) -> dict[str, float]:
        milliseconds = do_bench(function, warmup=50, rep=200, return_mode="median")
        return {"ms": round(milliseconds, 4), "tflops": round(work / milliseconds / 1e9, 1)}

    found: dict[str, Any] = {}
    results: list[Tensor] = []
    for name, product, least in (("torch", squared, 2**40), ("kernel", symmetric.squared, 0)):
        with mock.patch.object(symmetric, "_LEAST", least):
            found[name] = {
                "gram": row(lambda product=product: product(wide), 2 * count * small**2 * large),
                "polynomial": row(lambda product=product: product(gram, 2.9, -6.9), 2 * count * small**3),
                "all": row(
                    lambda: orthogonalize_(matrices, GIVEN), count * flops(rows, columns, steps=STEPS)
                ),
            }
            torch.manual_seed(1)
            results.append(torch.randn_like(matrices))
            orthogonalize_(results[-1], GIVEN)
    theirs, ours = (torch.linalg.svdvals(each[0].float()) for each in results)
    found["speedup"] = round(found["torch"]["all"]["ms"] / found["kernel"]["all"]["ms"], 3)
    found["error"] = round((ours - theirs).abs().max().item(), 4)
    return found


def main() -> None:
    """Measure all shapes, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="each NxROWSxCOLUMNS")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = {}
    for shape in options.shapes:
        count, rows, columns = map(int, shape.split("x"))
        figures[shape] = measured((count, rows, columns))
        print(shape, figures[shape], flush=True)
    write_result("newton_schulz", figures, options.output)


if __name__ == "__main__":
    main()
