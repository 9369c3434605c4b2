"""Output layer and cross-entropy, forward and backward: the plain one and ours, in 16 and 8 bits.

python benchmarks/linear_cross_entropy.py [--tokens 8192 16384] [--widths 1024 2048 2560]

The plain loss is F.cross_entropy on the fp32 logits of all tokens. It is compiled as a whole; of ours, only
the part between the matrix products is compiled, or a kernel (ours_kernels). ours_codes has 8-bit products
with delayed scaling, and kernels. Figures: milliseconds of a forward and backward, the best of
--rounds; the rate of the three products, 6 FLOPs per token and element of the weight; on a GPU the peak
memory above the inputs, gradients included; and the relative error of loss and gradients against the plain
ones.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from megatron_zpp.model.fp8.cast import INPUT, LARGEST, SMALLEST, factors_of
from megatron_zpp.model.fp8.output import OutputProduct
from megatron_zpp.model.loss import LossKernels, linear_cross_entropy, logits_to_gradient

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def plain(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The loss of a plain script."""
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets)


def contestant(name: str) -> Loss:
    """Build a contestant when its turn comes, because a machine without a compiler cannot compile."""
    contestants: dict[str, Callable[[], Loss]] = {
        "plain": lambda: plain,
        "plain_compiled": lambda: torch.compile(plain),
        "ours": lambda: linear_cross_entropy,
        "ours_compiled": lambda: partial(
            linear_cross_entropy, passes=LossKernels(torch.compile(logits_to_gradient))
        ),
        "ours_kernels": lambda: partial(linear_cross_entropy, passes=_kernels()),
        "ours_codes": _coded,
    }
    return contestants[name]()


CONTESTANTS = ("plain", "plain_compiled", "ours", "ours_compiled")
WITH_KERNELS = ("ours_kernels", "ours_codes")  # on GPUs


def _kernels() -> LossKernels:
    from megatron_zpp.model.fp8.kernels import coded_loss
    from megatron_zpp.model.fused import loss

    return replace(loss.PASSES, to_codes=coded_loss.logits_to_codes)


def _coded() -> Loss:
    """8-bit products, with the scales of the first pass in all later ones."""
    from megatron_zpp.model.fp8.kernels.cast import cast

    product, passes = OutputProduct(cast).cuda(), _kernels()

    def loss(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        value = product.loss(x, weight, targets, vocab_size, passes=passes)
        if product.factors is None:
            product.factors = factors_of(LARGEST[INPUT] / product.maxima.clamp(min=SMALLEST))
        return value

    return loss


def pass_through(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Run a forward and backward and return the loss; the gradients are in `grad`."""
    x.grad = weight.grad = None
    value = loss(x, weight, targets, vocab_size)
    value.backward()
    return value.detach()


def _gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


def seconds(run: Callable[[], Tensor], device: torch.device, steps: int) -> float:
    """Mean seconds of one of `steps` runs."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / steps


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Callable[[], Tensor], x: Tensor, weight: Tensor) -> int | None:
    """Peak memory of one run above the memory in use before it; None without CUDA."""
    if x.device.type != "cuda":
        return None
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def measure(
    tokens: int, width: int, vocab_size: int, names: list[str], device: torch.device, steps: int, rounds: int
) -> dict[str, Any]:
    """The figures of each contestant at one size, bf16."""
    generator = torch.Generator(device).manual_seed(tokens + width)
    padded = -(-vocab_size // 128) * 128
    x, weight = (
        torch.randn(rows, width, generator=generator, device=device).mul_(std).bfloat16().requires_grad_()
        for rows, std in ((tokens, 1.0), (padded, 0.02))
    )
    targets = torch.randint(vocab_size, (tokens,), generator=generator, device=device)
    runs = {name: partial(pass_through, contestant(name), x, weight, targets, vocab_size) for name in names}
    exact = (pass_through(plain, x, weight, targets, vocab_size), *_gradients(x, weight))
    figures: dict[str, Any] = {}
    for name, run in runs.items():
        for _ in range(2):  # compiles
            loss = run()
        pairs = zip((loss, *_gradients(x, weight)), exact, strict=True)
        off = [((one - other).float().norm() / other.float().norm()).item() for one, other in pairs]
        figures[name] = {"off": dict(zip(("loss", "of_x", "of_weight"), off, strict=True))}
        figures[name]["peak_bytes"] = peak_bytes(run, x, weight)
    timed: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, run in runs.items():
            timed[name].append(seconds(run, device, steps))
    flops = 6 * tokens * width * padded
    for name in names:
        best = min(timed[name])
        figures[name] |= {"milliseconds": round(1000 * best, 3), "tflops": round(flops / best / 1e12, 1)}
    return figures


def main() -> None:
    """Measure all sizes into one result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 2560])
    parser.add_argument("--vocab-size", type=int, default=50304)
    everyone = CONTESTANTS + WITH_KERNELS
    parser.add_argument("--contestants", nargs="+", choices=everyone, help="default: all that run there")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu works, for small sizes")
    options.contestants = options.contestants or (CONTESTANTS if options.device == "cpu" else everyone)
    device = torch.device(options.device)
    figures = {}
    for width in options.widths:
        for tokens in options.tokens:
            figures[f"tokens_{tokens}_width_{width}"] = measure(
                tokens, width, options.vocab_size, options.contestants, device, options.steps, options.rounds
            )
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    write_result("linear_cross_entropy", {"settings": settings, **figures}, options.output)


if __name__ == "__main__":
    main()
