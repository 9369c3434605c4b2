"""Chooses the algorithms of a run's matrix products before its first step, equally on all ranks.

Rank 0 chooses for all. What the checkpoint says comes first, then what earlier starts on the same kind of GPU
have measured; only the rest is measured. So a run that is started again computes the same bits.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.rendezvous import ranges
from megatron_zpp.model.product_algorithms import ProductAlgorithms
from megatron_zpp.model.products import LinearAlgorithms, ProductShape, chosen_linears
from megatron_zpp.ops import products
from megatron_zpp.train.product_cache import ProductCache
from megatron_zpp.train.time_products import Timings
from megatron_zpp.zero.engine import ZeroEngine

FLAG = "--gemm-algorithms"
Timer = Callable[[ProductShape], Timings]


@dataclass(frozen=True)
class Choice:
    """Algorithms, and lines for the log on where they come from."""

    algorithms: ProductAlgorithms
    lines: list[str]


def of_device(device: torch.device) -> ProductAlgorithms:
    """No algorithms, of this device and these versions. Raises ValueError without cuBLASLt in the kernels."""
    version = products.cublaslt_version()
    if version == 0:
        fix = "needs kernels built with cublasLt.h, of CUDA's toolkit or the package nvidia-cublas"
        raise option_error(FLAG, "measured", f"{fix}; install it and build again, or use heuristic")
    return ProductAlgorithms(torch.cuda.get_device_name(device), version, torch.__version__, {})


def check_aligned(engine: ZeroEngine) -> None:
    """Raise ValueError for parameters that begin where an algorithm of cuBLASLt cannot read them."""
    for unit in engine.units:
        for name, offset in zip(unit.names, unit.layout.offsets, strict=False):
            if offset % products.ALIGNMENT:
                fix = f"needs sizes that are multiples of {products.ALIGNMENT}; use heuristic"
                raise option_error(FLAG, "measured", f"{name} is element {offset} of its unit, and it {fix}")


def choose_products(
    model: nn.Module,
    rows: int,
    dtype: torch.dtype,
    *,
    own: ProductAlgorithms,
    saved: ProductAlgorithms | None,
    timer: Callable[[], Timer],
    cache: Callable[[], ProductCache],
    exchange: Exchange,
) -> Choice:
    """Set and return the algorithms of the model's linear maps for micro-batches of `rows` tokens.

    Every rank must call it. `own` has a rank's device and versions, `saved` is the checkpoint's; `timer` and
    `cache` are made on rank 0 if they are needed. Raises ValueError, on all ranks, if they have different
    devices or versions, or if rank 0 cannot measure.
    """
    if problem := exchange.combine("device", str(own), _difference):
        raise option_error(FLAG, "measured", problem)
    if exchange.topology.rank == 0:
        exchange.put("choice", _choice(model, rows, dtype, own, saved, timer, cache, exchange.progress))
    choice = exchange.get("choice")
    if choice["problem"] is not None:
        raise option_error(FLAG, "measured", f"{choice['problem']}; use heuristic")
    algorithms = ProductAlgorithms.from_json(choice["algorithms"])
    for _, linear in chosen_linears(model):
        shapes = linear.product_shapes(rows, dtype).items()
        chosen = {product: algorithms.chosen.get(shape.name, "") for product, shape in shapes}
        linear.algorithms = LinearAlgorithms(rows, **chosen)
    return Choice(algorithms, choice["lines"])


def _choice(
    model: nn.Module,
    rows: int,
    dtype: torch.dtype,
    own: ProductAlgorithms,
    saved: ProductAlgorithms | None,
    timer: Callable[[], Timer],
    cache: Callable[[], ProductCache],
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Rank 0's choice as JSON; `problem` is None unless the choice fails."""
    shapes = sorted(_shapes(model, rows, dtype), key=lambda shape: shape.name)
    lines: list[str] = []
    try:
        chosen = _kept(own, saved, lines)
        origin = "from the checkpoint"
        if missing := [shape for shape in shapes if shape.name not in chosen]:
            kept = cache()
            origin, chosen = "from the cache", kept.read(own) | chosen
            if missing := [shape for shape in missing if shape.name not in chosen]:
                measured, seconds = _measure(missing, timer(), progress, lines)
                kept.add(own, measured)
                chosen |= measured
                origin = f"{len(missing)} measured in {seconds:.1f} s"
    except (RuntimeError, ValueError, OSError) as error:  # of the device and of files
        return {"problem": one_line(error), "algorithms": None, "lines": []}
    used = own.with_chosen({shape.name: chosen[shape.name] for shape in shapes})
    others = sum(map(bool, used.chosen.values()))
    lines.append(f" {others} of {len(shapes)} matrix products by measured algorithms ({origin})")
    return {"problem": None, "algorithms": asdict(used), "lines": lines}


def _kept(own: ProductAlgorithms, saved: ProductAlgorithms | None, lines: list[str]) -> dict[str, str]:
    """The checkpoint's algorithms, if they are of this device and these versions."""
    if saved is None:
        return {}
    if saved.fits(own):
        return dict(saved.chosen)
    lines.append(
        f" WARNING: the checkpoint's algorithms of matrix products are of {saved}; this is {own}, so that "
        "they are chosen anew and bits may differ"
    )
    return {}


def _measure(
    shapes: Iterable[ProductShape], timer: Timer, progress: Callable[[], None], lines: list[str]
) -> tuple[dict[str, str], float]:
    """The fastest algorithms, and the seconds to find them; `lines` get those that are not torch's."""
    started, chosen = time.perf_counter(), {}
    for shape in shapes:
        timings = timer(shape)
        chosen[shape.name] = name = timings.fastest
        if name:
            fast, own = (1000 * seconds for seconds in (timings.algorithms[name], timings.own))
            lines.append(f" {shape.name}: {fast:.3f} ms, torch's own product {own:.3f} ms")
        progress()
    return chosen, time.perf_counter() - started


def _shapes(model: nn.Module, rows: int, dtype: torch.dtype) -> set[ProductShape]:
    """The distinct products of the model's linear maps that an algorithm of cuBLASLt may compute."""
    shapes = {
        shape for _, linear in chosen_linears(model) for shape in linear.product_shapes(rows, dtype).values()
    }
    aligned = products.ALIGNMENT
    return {each for each in shapes if all(size % aligned == 0 for size in (each.m, each.n, each.k))}


def _difference(devices: list[str]) -> str | None:
    """Which ranks differ from rank 0; None if none does."""
    others = [rank for rank, device in enumerate(devices) if device != devices[0]]
    if not others:
        return None
    return (
        f"needs GPUs of one kind: rank{'s' * (len(others) > 1)} {ranges(others)} with {devices[others[0]]}, "
        f"rank 0 with {devices[0]}; use heuristic"
    )
