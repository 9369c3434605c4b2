"""Lloyd-Max levels against the conditions that define them, and how codes are packed."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.lloyd_max import (
    BOUNDARIES,
    LEVELS,
    nearest_codes,
    normalised,
    stored_scales,
)

# Max's table I: the mean squared error with 4 and 16 levels.
ERRORS = {2: 0.1175, 4: 0.009497}


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def solved(bits: int) -> tuple[list[float], list[float]]:
    """Positive levels and boundaries in fp64: levels are centroids, boundaries half-way between levels."""
    count = 1 << (bits - 1)
    levels = [3 * (i + 0.5) / count for i in range(count)]
    for _ in range(5000):
        boundaries = [(low + high) / 2 for low, high in pairwise(levels)]
        edges = [0.0, *boundaries, math.inf]
        levels = [(density(a) - density(b)) / (tail(a) - tail(b)) for a, b in pairwise(edges)]
    return levels, boundaries


@pytest.mark.parametrize("bits", [2, 4])
def test_the_tables_are_the_nearest_fp32_numbers(bits: int) -> None:
    levels, boundaries = solved(bits)
    assert [np.float32(level) for level in LEVELS[bits]] == [np.float32(level) for level in levels]
    assert [np.float32(edge) for edge in BOUNDARIES[bits]] == [np.float32(edge) for edge in boundaries]
    edges = [0.0, *boundaries, math.inf]
    explained = sum(
        (tail(a) - tail(b)) * c * c for a, b, c in zip(edges[:-1], edges[1:], levels, strict=True)
    )
    assert 1 - 2 * explained == pytest.approx(ERRORS[bits], rel=1e-3)


@pytest.mark.parametrize("bits", [2, 4])
def test_boundaries_go_outwards_and_zeros_up(bits: int) -> None:
    edges = torch.tensor(BOUNDARIES[bits])
    below = edges.nextafter(torch.zeros(()))
    half = 1 << (bits - 1)
    x = torch.cat((edges, -edges, below, -below, torch.tensor([0.0, -0.0, 1e30, -1e30])))[None]
    outer, inner = list(range(1, half)), list(range(half - 1))
    expected = [half + i for i in outer] + [half - 1 - i for i in outer]
    expected += [half + i for i in inner] + [half - 1 - i for i in inner]
    assert nearest_codes(x, torch.ones(1), bits)[0].tolist() == [*expected, half, half, 2 * half - 1, 0]


def test_sizes_of_messages() -> None:
    format = LloydMaxFormat()  # 4 bits in blocks of 256
    assert format.message_bytes(0) == 0
    assert (format.message_bytes(256), LloydMaxFormat(2, 256).message_bytes(256)) == (144, 80)
    assert LloydMaxFormat(2, 256).bytes_per_element == 0.2578125
    with pytest.raises(ValueError, match="bits must be 2 or 4, got 3"):
        LloydMaxFormat(3)


def test_normalised_blocks_and_scales_of_awkward_ones() -> None:
    x = torch.zeros(9, 32)
    x[1, 3], x[2, 3], x[3, 3] = 3e38, 2.0**-126, 2.0**-127
    x[4, 3], x[5, 3], x[6, 3] = float("nan"), float("inf"), float("-inf")
    x[7] = -0.0
    x[8] = torch.arange(32) - 3.0
    z, power, finite, usable = normalised(x)
    assert finite.tolist() == [True] * 4 + [False] * 3 + [True] * 2
    assert usable.tolist() == [False, True, True] + [False] * 5 + [True]
    assert torch.equal(z[usable] * power[usable, None], x[usable])
    assert ((z[usable].abs().amax(1) >= 1) & (z[usable].abs().amax(1) < 2)).all()
    assert not z[~usable].any()
    stored = stored_scales(torch.tensor([0.0, 3.4e38, 2.0**-127, 1.0]), torch.ones(4).bool(), usable[1:2])
    assert stored.isnan().tolist() == [False, True, False, False]  # 3.4e38 is beyond bf16
    assert stored[[0, 2, 3]].tolist() == [0.0, 0.0, 1.0]
