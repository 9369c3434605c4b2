"""Curves from metrics files: any number by iteration, tokens, samples or time; smoothed, or as bands."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median, mode
from sys import intern
from typing import Any, Literal, get_args

from megatron_zpp.storage.regular import open_stream

LINE_LIMIT = 1 << 20  # bytes; a record has a few dozen numbers
_NUMBERS = 5  # of skipped lines, in a warning
Axis = Literal["iteration", "tokens", "samples", "hours"]
AXIS_LABELS = {axis: axis for axis in get_args(Axis)} | {"hours": "hours of training"}
Values = Mapping[str, Any]  # one record of a metrics file
_LARGEST = 1 << 60  # of any number; bytes of a step come closest


@dataclass(frozen=True)
class Curve:
    """Points in the order of `x`."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Band:
    """Mean, least and most of several curves where all of them have a point."""

    x: list[float]
    mean: list[float]
    least: list[float]
    most: list[float]


def read_metrics(path: str, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The records of a metrics file. Raises ValueError, with the line number, if it is another kind of file.

    Lines that are not JSON are skipped, and `warn` gets one line about them: a run that is killed or whose
    disk is full can cut a line. Nothing is said of an incomplete last line: a live run may be writing it.
    Records of steps that a run repeated, or never reached again, after a resume from an earlier checkpoint
    are omitted, so the iterations never decrease. `warn` gets a line if that leaves no step.
    """
    records: list[dict[str, Any]] = []
    skipped: list[int] = []  # line numbers
    incomplete, began = False, 0
    with open_stream(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT), b""), 1):
            ends = line.endswith(b"\n")
            try:
                record = json.loads(line, object_pairs_hook=_with_shared_names)
            except (ValueError, RecursionError):
                if not ends and len(line) == LINE_LIMIT:
                    raise _foreign(path, number) from None
                incomplete = not ends
                skipped += [number] if ends else []
                continue
            if not isinstance(record, dict) or not _is_record(record):
                raise _foreign(path, number)
            iteration, before = record["iteration"], len(records)
            at = before
            while at and records[at - 1]["iteration"] >= iteration:
                at -= 1
            # A run logs a step before it evaluates at that iteration, but for the last one before a stop. So
            # what else comes before a logged step is of a line that was abandoned.
            newer = any(each["iteration"] > iteration or "lm_loss" in each for each in records[at:])
            if not ("lm_loss" in record and newer):
                while at < before and records[at]["iteration"] == iteration:
                    at += 1
            del records[at:]
            if len(records) < before and not any("lm_loss" in kept for kept in records):
                began = number
            records.append(record)
    if not records and (skipped or incomplete):
        raise _foreign(path, 1)
    if not records:
        raise ValueError(f"{path}: empty; a run writes it with --metrics-file")
    if began:
        warn(f"{path}: lines before {began} are omitted: there the run began again, or another one")
    if skipped:
        lines = "1 line that is" if len(skipped) == 1 else f"{len(skipped)} lines that are"
        numbers = ", ".join(map(str, skipped[:_NUMBERS])) + (", …" if len(skipped) > _NUMBERS else "")
        warn(f"{path}: skipped {lines} not JSON: {numbers}")
    return records


def _with_shared_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names other objects have too: more than half of a large file's memory."""
    return {intern(name): value for name, value in pairs}


def _is_record(record: Values) -> bool:
    """Whether a run can have written this: an iteration, and numbers, but for the texts of its prompts.

    Losses and norms may be NaN or infinite, and nothing else.
    """
    iteration = record.get("iteration")
    if type(iteration) is not int or not 0 <= iteration < _LARGEST:
        return False
    for name, value in record.items():
        if _is_number(value):
            may_be_any = name.endswith(("loss", "perplexity", "norm"))
            of_loss = may_be_any and isinstance(value, float) and not 1e39 < abs(value) < inf  # fp32's range
            if not (abs(value) <= _LARGEST or of_loss):
                return False
        elif not (value is None or (isinstance(value, str) and name.startswith("sample"))):
            return False
    return True


def _foreign(path: str, number: int) -> ValueError:
    return ValueError(f"{path}:{number}: not a line of a metrics file")


def metric_names(records: Iterable[Values]) -> list[str]:
    """The numbers that the records have, in the order in which they appear."""
    names = dict.fromkeys(name for record in records for name, value in record.items() if _is_number(value))
    return [name for name in names if name != "iteration"]


def by_iteration(records: Sequence[Values], name: str) -> dict[int, float]:
    """One number by iteration; if a resumed run repeats an iteration, the later value counts."""
    points = {record["iteration"]: record[name] for record in records if _is_number(record.get(name))}
    return dict(sorted(points.items()))


def curve(records: Sequence[Values], name: str, axis: Axis = "iteration") -> Curve:
    """One number along an axis. Raises ValueError if the records do not say where iterations are on it."""
    points, place = by_iteration(records, name), axis_of(records, axis)
    return Curve([place(iteration) for iteration in points], list(points.values()))


def axis_of(records: Sequence[Values], axis: Axis) -> Callable[[int], float]:
    """Where an iteration is on an axis; between logged steps, and for evaluations, it is interpolated."""
    if axis == "iteration":
        return float
    if axis == "hours":
        known = _hours(records)
    elif axis == "tokens":
        known = tokens_trained(records)
    else:
        known = by_iteration(records, "consumed_samples")
    if not known:
        raise ValueError(f"no logged step says how many {axis} it took")
    known = {0: 0.0, **known} if min(known) > 0 else known
    iterations, places = list(known), list(known.values())
    return lambda iteration: _interpolated(iterations, places, iteration)


def tokens_trained(records: Sequence[Values]) -> dict[int, float]:
    """Tokens up to each logged step. Each interval counts with its own length of samples, if it has rates.

    A resumed run may have another sequence length. Raises ValueError if no logged step has rates.
    """
    usual = sequence_length(records)
    latest = {record["iteration"]: record for record in records if _is_number(record.get("consumed_samples"))}
    total = 0.0
    found: dict[int, float] = {}
    before: Values = {"iteration": 0, "consumed_samples": 0}
    for iteration, record in sorted(latest.items()):
        samples, per_step = record["consumed_samples"] - before["consumed_samples"], _tokens_per_step(record)
        # Whether the batch grew before the first logged step: its last size is not that of all steps.
        grew = not found and samples != iteration * (record.get("global_batch_size") or 0)
        if per_step is None or grew:
            total += usual * samples
        elif before.get("global_batch_size") in (None, record["global_batch_size"]):
            total += round(per_step / record["global_batch_size"]) * samples
        else:  # the batch grew within the interval: its last size is not that of all steps
            total += per_step * (iteration - before["iteration"])
        found[iteration], before = total, record
    return found


def sequence_length(records: Sequence[Values]) -> int:
    """Tokens per sample: the median over logged steps. Raises ValueError if none of them has rates."""
    found = [
        per_step / record["global_batch_size"]
        for record in records
        if (per_step := _tokens_per_step(record)) is not None
    ]
    if not found:
        raise ValueError("no logged step says how many tokens it took")
    return round(median(found))


def _tokens_per_step(record: Values) -> float | None:
    """The mean over the interval of a logged step, from its rate; None without a rate or a batch."""
    if not all(_is_number(record.get(name)) for name in ("tokens_per_second", "elapsed_ms")):
        return None
    tokens: float = record["tokens_per_second"] * record["elapsed_ms"] / 1000
    return tokens if record.get("global_batch_size") else None


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average with `weight` for the past, corrected for its start; 0 changes nothing."""
    mean, total, result = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(mean / total)
    return result


def band(runs: Sequence[Sequence[Values]], name: str, axis: Axis, weight: float = 0.0) -> Band:
    """One number of several runs, smoothed, at the iterations that all of them logged.

    On the axis an iteration is where it is in the mean: no two runs take the same time.
    """
    tables = []
    for records in runs:
        points = by_iteration(records, name)
        tables.append(dict(zip(points, smoothed(list(points.values()), weight), strict=True)))
    shared = sorted(set.intersection(*map(set, tables)))
    places = [axis_of(records, axis) for records in runs] if shared else []
    columns = [[table[iteration] for table in tables] for iteration in shared]
    return Band(
        [sum(place(iteration) for place in places) / len(places) for iteration in shared],
        [sum(column) / len(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
    )


def _hours(records: Sequence[Values]) -> dict[int, float]:
    """Hours of training up to each logged step: its time per iteration counts since the one before it."""
    times = by_iteration(records, "elapsed_ms")
    first = next(iter(times), 0)
    interval = mode([later - earlier for earlier, later in pairwise(times)] or [first])
    before = max(0, first - interval)  # the file of a resumed run may begin late
    total, hours = 0.0, {}
    for iteration, milliseconds in times.items():
        total += (iteration - before) * milliseconds / 3.6e6
        before = iteration
        hours[iteration] = total
    return hours


def _interpolated(xs: list[int], ys: list[float], x: int) -> float:
    """Linear between known points, and with the nearest slope outside of them."""
    if len(xs) == 1:
        return float(ys[0])
    high = min(max(1, bisect_left(xs, x)), len(xs) - 1)
    slope = (ys[high] - ys[high - 1]) / (xs[high] - xs[high - 1])
    return ys[high] - slope * (xs[high] - x)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
