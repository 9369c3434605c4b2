"""Tunes optimizers by coordinate descent on the final loss, and compares the tokens that they need.

A point has a place on the ladder of each setting. Its star, the point and its neighbours along each ladder,
runs side by side. Every setting that helps by more than the tolerance takes its best step, all together;
where that is no better than the best single step, that one is taken. First rates move by factors of two,
then of the square root of two. The search ends where no neighbour helps.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.intervals import mean_and_interval
from benchmarks.paired_runs import Job

Point = tuple[int, ...]
Runs = Mapping[Job, Mapping[str, Any]]
_RATES = tuple(1e-3 * 2 ** (half / 2) for half in range(-4, 11))
_SCALARS = tuple(2.0**half for half in range(-4, 5))
_DECAYS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Ladder:
    """Values of a setting, the place of the first one tried, and the places that the first steps move by."""

    values: tuple[float, ...]
    start: int
    stride: int = 1


# By optimizer and setting; a dot leads into a group of RunSettings.
SEARCHES: dict[str, dict[str, Ladder]] = {
    "adamw": {
        "lr": Ladder(_RATES, 6, 2),  # 2e-3
        "adamw.beta2": Ladder((0.9, 0.95, 0.98, 0.99, 0.995), 1),
        "adamw.weight_decay": Ladder(_DECAYS, 2),
        "warmup_fraction": Ladder((0.02, 0.05, 0.1, 0.2, 0.4), 2),
    },
    "muon": {
        "lr": Ladder(_RATES, 8, 2),  # 4e-3
        "muon.momentum": Ladder((0.8, 0.9, 0.95, 0.975), 2),
        "muon.weight_decay": Ladder(_DECAYS, 2),
        "muon.scalar_lr": Ladder(_SCALARS, 4),
    },
    "islands": {  # the outer optimizer, and the rate of the inner one
        "islands.lr": Ladder((0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2), 5, 2),
        "islands.momentum": Ladder((0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 8, 2),
        "lr": Ladder(_RATES, 6),
    },
}


@dataclass(frozen=True)
class Descent:
    """How far a search has come: the points that it went over, and those whose losses it waits for."""

    path: tuple[Point, ...]
    wanted: tuple[Point, ...]

    @property
    def best(self) -> Point:
        """Where it stands."""
        return self.path[-1]


def descend(
    ladders: Sequence[Ladder], start: Point, loss_of: Callable[[Point], float | None], tolerance: float
) -> Descent:
    """Follows a search from its start through all losses that are known; `tolerance` is a share of a loss."""
    path = [start]
    strides = [ladder.stride for ladder in ladders]
    while True:
        here = path[-1]
        star = [(here,), *_neighbours(here, ladders, strides)]
        missing = [point for points in star for point in points if loss_of(point) is None]
        if missing:
            return Descent(tuple(path), tuple(missing))
        limit = _known(loss_of, here) * (1 - tolerance)
        moves = [min(points, key=lambda point: _known(loss_of, point)) for points in star[1:] if points]
        moves = [point for point in moves if _known(loss_of, point) < limit]
        if not moves and max(strides) == 1:
            return Descent(tuple(path), ())
        if not moves:
            strides = [1] * len(strides)
            continue
        together = tuple(
            next((move[at] for move in moves if move[at] != place), place) for at, place in enumerate(here)
        )
        if loss_of(together) is None:
            ahead = [together, *(p for points in _neighbours(together, ladders, strides) for p in points)]
            return Descent(tuple(path), tuple(point for point in ahead if loss_of(point) is None))
        path.append(min([*moves, together], key=lambda point: _known(loss_of, point)))


def _neighbours(here: Point, ladders: Sequence[Ladder], strides: Sequence[int]) -> list[tuple[Point, ...]]:
    """By setting: the points one stride down and up its ladder."""
    return [
        tuple(
            (*here[:at], here[at] + step, *here[at + 1 :])
            for step in (-strides[at], strides[at])
            if 0 <= here[at] + step < len(ladder.values)
        )
        for at, ladder in enumerate(ladders)
    ]


def _known(loss_of: Callable[[Point], float | None], point: Point) -> float:
    loss = loss_of(point)
    return math.inf if loss is None or math.isnan(loss) else loss


def start_of(optimizer: str, settings: Mapping[str, Any] | None) -> Point:
    """Where a search starts: at `settings` that another one has found, if there are any."""
    if settings is None:
        return tuple(ladder.start for ladder in SEARCHES[optimizer].values())
    values = dict(settings)
    for group in SEARCHES:
        values |= {f"{group}.{leaf}": value for leaf, value in settings.get(group, {}).items()}
    return tuple(
        ladder.values.index(values[name]) if name in values else ladder.start
        for name, ladder in SEARCHES[optimizer].items()
    )


def name_of(optimizer: str, point: Point, **others: Any) -> str:
    """The name of a run: its settings that differ from the campaign's, as JSON."""
    settings: dict[str, Any] = {optimizer: {}, **others}
    for (setting, ladder), place in zip(SEARCHES[optimizer].items(), point, strict=True):
        group, _, leaf = setting.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[leaf] = ladder.values[place]
    if optimizer == "muon":  # AdamW's part has Muon's decay
        settings["adamw"] = {"weight_decay": settings["muon"]["weight_decay"]}
    return json.dumps(settings, sort_keys=True)


class Comparison:
    """The searches of some optimizers, and then runs of their best points with some seeds.

    Beside AdamW's, Muon's run with `shares` of the steps too, each with a schedule of its own.
    """

    def __init__(
        self,
        optimizers: Sequence[str],
        *,
        steps: int,
        tolerance: float,
        seeds: int,
        shares: Sequence[float],
        starts: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`starts`: by optimizer, settings that the search begins with."""
        self._starts = {name: start_of(name, starts.get(name)) for name in optimizers}
        self._tolerance, self._seeds = tolerance, seeds
        self._steps = {share: round(share * steps) for share in shares}

    def wanted(self, done: Runs) -> list[Job]:
        """The runs that are needed next."""
        searches = self.searches(done)
        jobs = [(name_of(name, point), 0) for name, at in searches.items() for point in at.wanted]
        if jobs:
            return jobs
        names = [name_of(name, at.best) for name, at in searches.items()]
        names += self._shorter(searches).values()
        return [(name, seed) for seed in range(self._seeds) for name in names]

    def searches(self, done: Runs) -> dict[str, Descent]:
        """Where each search is; every point has one run, with seed 0."""

        def loss_of(optimizer: str, point: Point) -> float | None:
            run = done.get((name_of(optimizer, point), 0))
            return None if run is None else run["loss"]

        return {
            name: descend(list(SEARCHES[name].values()), start, partial(loss_of, name), self._tolerance)
            for name, start in self._starts.items()
        }

    def figures(self, done: Runs) -> dict[str, Any]:
        """Paths, best settings, final losses, and the share of AdamW's tokens that Muon needs."""
        searches = self.searches(done)
        figures: dict[str, Any] = {}
        for name, at in searches.items():
            best = name_of(name, at.best)
            figures[name] = {
                "ended": not at.wanted,
                "path": [[name_of(name, point), _loss(done, name_of(name, point), 0)] for point in at.path],
                "settings": json.loads(best),
                "losses": self._losses(done, best),
            }
        if "muon" in searches:
            shorter = self._shorter(searches)
            figures["muon"]["by_share"] = {share: self._losses(done, name) for share, name in shorter.items()}
            if "adamw" in searches:
                figures["share_of_tokens"] = _share_of_tokens(figures)
        return figures

    def _shorter(self, searches: Mapping[str, Descent]) -> dict[float, str]:
        if "muon" not in searches:
            return {}
        best = searches["muon"].best
        return {share: name_of("muon", best, steps=steps) for share, steps in self._steps.items()}

    def _losses(self, done: Runs, name: str) -> dict[int, float | None]:
        return {seed: _loss(done, name, seed) for seed in range(self._seeds)}


def _loss(done: Runs, name: str, seed: int) -> float | None:
    return done[name, seed]["loss"] if (name, seed) in done else None


def _share_of_tokens(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Of AdamW's tokens, with which Muon has its loss: by seed, their mean and its interval.

    A share lies on a line between two that were tried; None where all of these end below AdamW, or above it.
    """
    shares = {**figures["muon"]["by_share"], 1.0: figures["muon"]["losses"]}
    found: dict[int, float | None] = {}
    for seed, goal in figures["adamw"]["losses"].items():
        points = sorted((share, losses[seed]) for share, losses in shares.items())
        if goal is None or any(loss is None for _, loss in points):
            continue
        found[seed] = next(
            (
                low + (high - low) * (above - goal) / (above - below)
                for (low, above), (high, below) in pairwise(points)
                if below <= goal <= above
            ),
            None,
        )
    values = [value for value in found.values() if value is not None]
    mean, half = mean_and_interval(values) if values else (None, None)
    return {"by_seed": found, "mean": mean, "half_width_95": half}
