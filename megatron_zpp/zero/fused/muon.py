"""Muon's passes over the elements of a unit, each one kernel launch: all parts of its matrices at once.

A table says where parts are: a program takes at most BLOCK elements of one part.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_zpp.exchange.segments import GradSegment
from megatron_zpp.ops.state_codes import SEED
from megatron_zpp.zero.muon_passes import MuonElements, MuonPasses, StepNumbers

_BLOCK, _WARPS = 4096, 8
_SEED, BLOCK = tl.constexpr(SEED), tl.constexpr(_BLOCK)
_ALIGNED = 16  # elements, at most: what the compiler gains by more is nothing


class FusedPasses(MuonPasses):
    """The same by kernels. A part is in one segment of the gradient."""

    def __init__(self, given: MuonElements) -> None:
        super().__init__(given)
        rows, scales = [], []
        for place, scale in zip(given.places, given.scales, strict=True):
            there = -1 if place.there is None else place.there
            for done in range(0, len(place.elements), _BLOCK):
                count = min(_BLOCK, len(place.elements) - done)
                target = there if there < 0 else there + done
                rows.append((place.elements.start + done, target, place.back + done, count))
                scales.append(scale)
        device = given.room.device
        self._starts = [start for start, *_ in rows]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        numbers = (max(number, 0) for row in rows for number in row)
        self._aligned = math.gcd(_ALIGNED, given.owned.start, given.states.start, *numbers)

    def average(self, gradients: Sequence[GradSegment], momentum: Tensor, numbers: StepNumbers) -> None:
        given = self._given
        for start, flat in gradients:
            first = given.owned.start + start
            rows = slice(*(bisect_left(self._starts, at) for at in (first, first + len(flat))))
            if programs := rows.stop - rows.start:
                halves = momentum.dtype == torch.bfloat16
                kept = momentum.view(torch.int16) if halves else momentum  # Triton's interpreter has no bf16
                _average_kernel[(programs,)](
                    *(flat, kept, given.room, self._table[rows], numbers.divisor, numbers.found_inf),
                    *(numbers.steps, first, given.states.start, given.unit, given.momentum),
                    HALVES=halves,
                    NESTEROV=given.nesterov,
                    ALIGNED=math.gcd(self._aligned, start),
                    num_warps=_WARPS,
                )

    def apply(self, master: Tensor, source: Tensor | None, numbers: StepNumbers) -> None:
        given = self._given
        if self._starts:
            # Without a source another tensor is passed, and not touched.
            _apply_kernel[(len(self._starts),)](
                *(master, master if source is None else source, given.room, self._table, self._scales),
                *(numbers.found_inf, given.owned.start, numbers.shrink, numbers.step),
                WRITES=source is not None,
                ALIGNED=self._aligned,
                num_warps=_WARPS,
            )


@triton.jit
def _draws(elements, unit, step):
    """12 random bits of each element of a unit: `draws_of` (ops/state_codes.py), first moments."""
    quads, zero = (elements // 4).to(tl.uint32), (elements * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(_SEED, quads, zero, zero + unit, zero + step, n_rounds=7)
    at = elements % 4
    return tl.where(at < 2, tl.where(at == 0, w0, w1), tl.where(at == 2, w2, w3)).to(tl.int32) & 0xFFF


@triton.jit
def _rounded_bf16(x, draws):
    """The bits (int16) of bf16 numbers: `_rounded_bf16` (ops/state_codes.py)."""
    bits = x.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    rounded = tl.minimum((tl.minimum(magnitudes, 0x7F800000) + ((2 * draws + 1) << 3)) >> 16, 0x7F7F)
    rounded = tl.where(magnitudes < 0x7F800000, rounded, 0x7F80)
    rounded = tl.where(magnitudes > 0x7F800000, 0x7FC0, rounded)
    return (rounded | (bits >> 16 & 0x8000)).to(tl.int16)


@triton.jit(do_not_specialize=["gradient_first", "momentum_first", "unit"])
def _average_kernel(
    gradient_ptr,
    momentum_ptr,  # fp32, or the bits of bf16
    room_ptr,
    table_ptr,  # (P, 4): first element in the unit, in the room before and after Newton-Schulz; elements
    divisor_ptr,  # () fp32, as is found_inf
    found_inf_ptr,
    steps_ptr,
    gradient_first,  # element of the unit
    momentum_first,
    unit,
    momentum,
    HALVES: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if tl.load(found_inf_ptr) != 0:
        return
    row = table_ptr + 4 * tl.program_id(0)
    start, there, count = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.multiple_of(count, ALIGNED)
    of_gradient = gradient_ptr + tl.multiple_of(start - gradient_first, ALIGNED) + columns
    of_momentum = momentum_ptr + tl.multiple_of(start - momentum_first, ALIGNED) + columns
    gradient = tl.load(of_gradient, mask=inside).to(tl.float32) / tl.load(divisor_ptr)
    average = tl.load(of_momentum, mask=inside)
    if HALVES:
        average = (average.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    average += (1 - momentum) * (gradient - average)
    if HALVES:
        draws = _draws(start + columns, unit, tl.load(steps_ptr).to(tl.uint32))
        tl.store(of_momentum, _rounded_bf16(average, draws), mask=inside)
    else:
        tl.store(of_momentum, average, mask=inside)
    if NESTEROV:
        average = gradient + momentum * (average - gradient)
    if there >= 0:
        tl.store(room_ptr + tl.multiple_of(there, ALIGNED) + columns, average, mask=inside)


@triton.jit(do_not_specialize=["master_first"])
def _apply_kernel(
    master_ptr,  # fp32
    source_ptr,  # what is gathered
    room_ptr,
    table_ptr,  # (P, 4)
    scales_ptr,  # (P) fp32
    found_inf_ptr,
    master_first,  # element of the unit
    shrink,
    step,
    WRITES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if tl.load(found_inf_ptr) != 0:
        return
    row = table_ptr + 4 * tl.program_id(0)
    start, back, count = tl.load(row), tl.load(row + 2), tl.load(row + 3)
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.multiple_of(count, ALIGNED)
    at = tl.multiple_of(start - master_first, ALIGNED) + columns
    update = tl.load(room_ptr + tl.multiple_of(back, ALIGNED) + columns, mask=inside).to(tl.float32)
    weight = tl.load(master_ptr + at, mask=inside) * shrink
    weight += update * (step * tl.load(scales_ptr + tl.program_id(0)))
    tl.store(master_ptr + at, weight, mask=inside)
    if WRITES:
        tl.store(source_ptr + at, weight, mask=inside)
