"""Kernels that make codes for 8-bit products, each beside a copy that moves as many bytes.

python benchmarks/coded_kernels.py --hidden-size 2048 --rows 16384

Shapes are those of a GPT layer and of a Llama-like one with as many parameters; logits are of a quarter of
the rows and 50,304 entries. A figure is the time of a
copy of the bytes that a kernel has to read and write, over the kernel's time: 1 would be as fast as memory
is. Times are the best of --rounds, of ten calls in a CUDA graph, so that starting a kernel does not count.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch
from torch import Tensor

from benchmarks.common import RESULTS, write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT, INPUT, WEIGHT, factors_of
from megatron_zpp.model.fp8.kernels.cast import cast
from megatron_zpp.model.fp8.kernels.coded_activation import coded_activation, coded_activation_backward
from megatron_zpp.model.fp8.kernels.coded_loss import logits_to_codes
from megatron_zpp.model.fp8.kernels.coded_norm import _coded_norm
from megatron_zpp.model.fp8.kernels.gradient_cast import cast_gradient, cast_gradients_of_heads

CALLS = 10  # in a graph


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """benchmark of the kernels that make codes"""

    hidden_size: int = option(2048, "Width of a layer.", at_least=16)
    rows: int = option(16384, "Tokens of a micro-batch.", at_least=16)
    rounds: int = option(5, "Repetitions, of which the best counts.", at_least=1)
    output: Path = option(RESULTS, "Directory for coded_kernels.json.")


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Of one call on the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels are compiled and loaded
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(rounds + 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / CALLS)
    return min(times[1:])


def kernels(rows: int, width: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Names, bytes that must be read and written, and calls."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    factors, maxima = factors_of(torch.full((3,), 3.0, device="cuda")), torch.zeros(3, device="cuda")
    x, weight = drawn(rows, width), drawn(4 * width, width)
    gain, shift, bias = drawn(width), drawn(width), drawn(4 * width)
    of_q, of_k, of_v = (drawn(rows, width) for _ in range(3))
    wide, of_wide, of_half = drawn(rows, 4 * width), drawn(rows, 4 * width), drawn(rows, 2 * width)
    one, batch = rows * width, x.view(1, rows, width)
    call: Callable[[], object]
    yield "cast of an input", 4 * one, partial(cast, x, factors, maxima, INPUT, rows=True, columns=True)
    for layout, by_rows in (("rows", True), ("columns", False)):
        call = partial(cast, weight, factors, maxima, WEIGHT, rows=by_rows, columns=not by_rows)
        yield f"cast of a weight by {layout}", 3 * weight.numel(), call
    yield "cast of a gradient, with sums", 4 * one, partial(cast_gradient, x, factors, maxima, sums=True)
    call = partial(cast_gradients_of_heads, of_q, of_k, of_v, factors, maxima, sums=True)
    yield "cast of the gradients of heads, with sums", 12 * one, call
    for name, added, count in (("norm", None, 4), ("sum and norm", batch, 8)):
        yield name, count * one, partial(_coded_norm, batch, added, gain, shift, 1e-5, factors, maxima, True)
    yield "GELU", 16 * one, partial(coded_activation, wide, bias, factors, maxima, False, True)
    yield (
        "GELU's backward",
        24 * one,
        partial(coded_activation_backward, of_wide, wide, bias, factors, maxima, False),
    )
    yield "SwiGLU", 12 * one, partial(coded_activation, wide, None, factors, maxima, True, True)
    call = partial(coded_activation_backward, of_half, wide, None, factors, maxima, True)
    yield "SwiGLU's backward", 20 * one, call
    logits, targets = drawn(rows // 4, 50304), torch.randint(50257, (rows // 4,), device="cuda")
    codes = (torch.empty_like(each, dtype=FORMATS[GRADIENT]) for each in (logits, logits.T.contiguous()))
    call = partial(logits_to_codes, logits, targets, 50257, *codes)
    yield "gradient of logits, which are read twice", 6 * logits.numel(), call


def main() -> None:
    """Time every kernel and a copy of its bytes, and write the figures."""
    settings = parse_options(Settings, "coded_kernels.py", __doc__, sys.argv[1:])
    if not torch.cuda.is_available():
        raise ValueError("coded_kernels.py needs a GPU")
    figures = {}
    for name, size, call in kernels(settings.rows, settings.hidden_size):
        source, target = (torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
        copy = microseconds(partial(target.copy_, source), settings.rounds)
        own = microseconds(call, settings.rounds)
        figures[name] = {
            "microseconds": round(own, 1),
            "copy_microseconds": round(copy, 1),
            "share_of_copy": round(copy / own, 3),
        }
    shape = {"rows": settings.rows, "hidden_size": settings.hidden_size}
    write_result("coded_kernels", {"shape": shape, "kernels": figures}, settings.output)


if __name__ == "__main__":
    run_tool("coded_kernels.py", main)
