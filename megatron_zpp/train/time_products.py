"""Times the algorithms of a product on a GPU, as a training step would run them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from megatron_zpp.model.products import ProductShape, own_product
from megatron_zpp.ops import products

_ROUNDS = 9  # each runs every algorithm once
_MARGIN = 0.02  # by which an algorithm has to be faster than torch's: more than medians differ between starts
_CANDIDATES = 8  # of cuBLASLt's heuristics
_FLUSHED_BYTES = 256 * 2**20  # several times the L2 cache, whose contents products of a step do not share
_WARM_SECONDS = 0.3  # of products before the first is timed: clocks rise under load, then fall with its heat


@dataclass(frozen=True)
class Timings:
    """Median seconds of torch's own product, and of each algorithm."""

    own: float
    algorithms: dict[str, float]

    @property
    def fastest(self) -> str:
        """The fastest algorithm, if it is faster than torch's product by a clear margin; else ""."""
        if not self.algorithms:
            return ""
        name = min(self.algorithms, key=lambda each: self.algorithms[each])
        return name if self.algorithms[name] < (1 - _MARGIN) * self.own else ""


class ProductTimer:
    """Times products on one GPU, whose memory holds the operands of one product at a time."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._warm = device, False

    def __call__(self, shape: ProductShape) -> Timings:
        """Time a product, by torch and by every algorithm."""
        left, right, bias = self.operands(shape)
        names = ["", *products.algorithms(left, right, bias, most=_CANDIDATES, **shape.transposed)]
        if not self._warm:
            self._warm_up(left, right, bias, shape)
        spent: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(1 + _ROUNDS):
            seconds = self._round(left, right, bias, shape, names)
            if turn:  # the first loads kernels
                for name, each in zip(names, seconds, strict=True):
                    spent[name].append(each)
        own, *others = (median(spent[name]) for name in names)
        return Timings(own, dict(zip(names[1:], others, strict=True)))

    def operands(self, shape: ProductShape) -> tuple[Tensor, Tensor, Tensor | None]:
        """Random factors and the bias of a product, because zeros would take less power and so less time."""
        left = (shape.k, shape.m) if shape.left_transposed else (shape.m, shape.k)
        right = (shape.n, shape.k) if shape.right_transposed else (shape.k, shape.n)
        bias = self._random(shape.n, dtype=shape.dtype) if shape.bias else None
        return self._random(*left, dtype=shape.dtype), self._random(*right, dtype=shape.dtype), bias

    def _random(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=self._device, generator=self._generator)

    def _warm_up(self, left: Tensor, right: Tensor, bias: Tensor | None, shape: ProductShape) -> None:
        spent = 0.0
        while spent < _WARM_SECONDS:
            spent += sum(self._round(left, right, bias, shape, [""] * 32, flushes=False))
        self._warm = True

    def _round(
        self,
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        shape: ProductShape,
        names: Sequence[str],
        *,
        flushes: bool = True,
    ) -> list[float]:
        """The seconds of one product by each algorithm."""
        events = []
        for name in names:
            if flushes:
                self._flushed.zero_()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            if name:
                products.multiply(left, right, bias, name, **shape.transposed)
            else:
                own_product(left, right, bias, **shape.transposed)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1000 for begin, end in events]
