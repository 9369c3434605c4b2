"""The matrix products of a layer: torch's own, and each algorithm that cuBLASLt's heuristics name.

python benchmarks/products.py [--rows 16384] [--widths 2048 2560] [--rounds 3]

A layer has four linear maps, each with a product in the forward and two in the backward. Figures: for each
product the milliseconds of torch's own and of the fastest algorithm, as --gemm-algorithms measured times
them, in each of --rounds repetitions; its FLOPs per second; whether the repetitions agree on the fastest
algorithm; and whether the algorithm computes the same bits each time. `layer_ms`: the sums over twelve
products, with torch's own, and with the algorithms that the first repetition chooses. GPUs only.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from megatron_zpp.model.products import ChosenLinear, ProductShape
from megatron_zpp.ops.library import load_kernels
from megatron_zpp.ops.products import cublaslt_version, multiply
from megatron_zpp.train.time_products import ProductTimer, Timings

MAPS = {
    "heads": (1, 3),
    "attention_output": (1, 1),
    "mlp_input": (1, 4),
    "mlp_output": (4, 1),
}  # of the width


def shapes_of(rows: int, width: int, dtype: torch.dtype) -> dict[str, ProductShape]:
    """The twelve products of a layer by name."""
    shapes = {}
    for name, (inputs, outputs) in MAPS.items():
        with torch.device("meta"):
            linear = ChosenLinear(inputs * width, outputs * width, multiply=multiply)
        for product, shape in linear.product_shapes(rows, dtype).items():
            shapes[f"{name}.{product}"] = shape
    return shapes


def same_bits(timer: ProductTimer, shape: ProductShape, algorithm: str) -> bool:
    """Whether three products of the same operands are equal."""
    left, right, bias = timer.operands(shape)
    first, *others = (multiply(left, right, bias, algorithm, **shape.transposed) for _ in range(3))
    return all(torch.equal(first, other) for other in others)


def measure(timer: ProductTimer, shape: ProductShape, rounds: int) -> tuple[dict[str, Any], Timings]:
    """The figures of one product, and its first timings."""
    timings = [timer(shape) for _ in range(rounds)]
    first = timings[0]
    ranked = sorted(first.algorithms, key=lambda name: first.algorithms[name])
    flops = 2 * shape.m * shape.n * shape.k
    own = [1000 * each.own for each in timings]
    best = [1000 * each.algorithms[ranked[0]] for each in timings] if ranked else []
    return {
        "shape": shape.name,
        "own_ms": [round(each, 4) for each in own],
        "best_ms": [round(each, 4) for each in best],
        "first_of_heuristic_ms": round(1000 * next(iter(first.algorithms.values())), 4) if ranked else None,
        "own_tflops": round(flops / min(own) / 1e9, 1),
        "best_tflops": round(flops / min(best) / 1e9, 1) if best else None,
        "gain": round(1 - min(best) / min(own), 4) if best else None,
        "chosen": [bool(each.fastest) for each in timings],
        "same_choice": len({each.fastest for each in timings}) == 1,
        "place_in_heuristics": [*first.algorithms].index(ranked[0]) if ranked else None,
        "algorithms": len(ranked),
        "same_bits": same_bits(timer, shape, ranked[0]) if ranked else None,
    }, first


def main() -> None:
    """Measure all widths into one result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 2560])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    load_kernels("cuda", print)
    timer, figures = ProductTimer(device), {}
    for width in options.widths:
        for rows in options.rows:
            layer, own, chosen = {}, 0.0, 0.0
            for name, shape in shapes_of(rows, width, getattr(torch, options.dtype)).items():
                layer[name], timings = measure(timer, shape, options.rounds)
                own += timings.own
                chosen += timings.algorithms[timings.fastest] if timings.fastest else timings.own
            layer["layer_ms"] = {"own": round(1000 * own, 3), "chosen": round(1000 * chosen, 3)}
            figures[f"width_{width}_rows_{rows}"] = layer
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    facts = {"settings": settings, "cublaslt": cublaslt_version()}
    write_result("products", facts | figures, options.output)


if __name__ == "__main__":
    main()
