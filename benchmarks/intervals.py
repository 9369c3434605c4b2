"""Means and their 95% intervals by Student's t."""

import math
import statistics
from collections.abc import Sequence


def mean_and_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """The mean and the half-width of its confidence interval; None for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, error * t_quantile(len(values) - 1, (1 + confidence) / 2)


def t_quantile(freedom: int, probability: float) -> float:
    """The t below which Student's distribution has this probability, of at least one half."""
    low, high = 0.0, 1.0
    while _t_probability(freedom, high) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(freedom, middle) < probability else (low, middle)
    return (low + high) / 2


def _t_probability(freedom: int, t: float, parts: int = 400) -> float:
    """P(T < t) for t >= 0 by Simpson's rule over the angle a with tan(a) = t / sqrt(freedom).

    There the density is proportional to cos(a)^(freedom - 1), which is smooth for any t.
    """
    logarithm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    angle = math.atan2(t, math.sqrt(freedom))
    weights = [1, *([4, 2] * (parts // 2))[:-1], 1]
    heights = (math.cos(angle * index / parts) ** (freedom - 1) for index in range(parts + 1))
    total = sum(weight * height for weight, height in zip(weights, heights, strict=True))
    return 0.5 + math.exp(logarithm) * total * angle / parts / 3
