"""Curves of metrics files along every axis."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.reporting.report.curves import (
    axis_of,
    band,
    curve,
    read_metrics,
    sequence_length,
    smoothed,
)


def step(iteration: int, loss: float | None = 1.0, seconds: float = 2.0, length: int = 16) -> dict:
    """A logged step of 4 samples of `length` tokens."""
    return {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "lm_loss": loss,
        "elapsed_ms": 1000 * seconds,
        "tokens_per_second": 4 * length / seconds,
        "global_batch_size": 4,
        "mfu": None,
        "sample": "text",
    }


RUN = [{"iteration": 0, "valid_loss": 5.0}, step(10, 3.0), step(20, 2.0, 4.0)]
RUN += [{"iteration": 15, "valid_loss": 4.0}]


@pytest.mark.parametrize(
    ("axis", "train", "valid"),
    [
        ("iteration", [10, 20], [0, 15]),
        ("samples", [40, 80], [0, 60]),
        ("tokens", [640, 1280], [0, 960]),
        ("hours", [20 / 3600, 60 / 3600], [0, 40 / 3600]),
    ],
)
def test_axes(axis: str, train: list[float], valid: list[float]) -> None:
    """10 steps of 2 s and 10 of 4 s; evaluations are between them."""
    assert curve(RUN, "lm_loss", axis).x == pytest.approx(train)
    assert curve(RUN, "valid_loss", axis).x == pytest.approx(valid)
    assert curve(RUN, "valid_loss", axis).y == [5.0, 4.0]


def test_a_file_of_a_resumed_run_begins_late() -> None:
    """Hours are those that the file saw: the first interval is as long as the others."""
    assert curve([step(110), step(120)], "lm_loss", "hours").x == pytest.approx([20 / 3600, 40 / 3600])


def test_a_stop_within_an_interval_changes_no_hours() -> None:
    records = [step(iteration) for iteration in (10, 20, 23, 30, 40)]
    assert curve(records, "lm_loss", "hours").x[-1] == pytest.approx(80 / 3600)


def test_tokens_per_sample_follow_from_the_rate() -> None:
    assert sequence_length(RUN) == 16
    with pytest.raises(ValueError, match="no logged step says how many tokens"):
        axis_of([{"iteration": 1, "consumed_samples": 4}], "tokens")
    with pytest.raises(ValueError, match="no logged step says how many hours"):
        axis_of([{"iteration": 1}], "hours")


def test_tokens_after_a_change_of_the_sequence_length() -> None:
    """Each interval counts with its own; an evaluation between two logged steps is between their places."""
    run = [step(10), step(20), *(step(iteration, length=64) for iteration in (30, 40, 50, 60))]
    first, then = 10 * 4 * 16, 10 * 4 * 64
    wanted = [first, *(2 * first + steps * then for steps in range(5))]
    assert curve(run, "lm_loss", "tokens").x == wanted
    assert axis_of(run, "tokens")(25) == 2 * first + then / 2
    del run[2]["tokens_per_second"]  # then the usual length counts
    assert curve(run, "lm_loss", "tokens").x == wanted


def test_tokens_where_the_batch_grows_within_an_interval() -> None:
    """`global_batch_size` is that of the last step, the rate that of all."""
    grown = step(20) | {"consumed_samples": 40 + 5 * 4 + 5 * 8, "global_batch_size": 8}
    grown |= {"elapsed_ms": 1000, "tokens_per_second": 16 * 6}
    assert curve([step(10), grown], "lm_loss", "tokens").x == [640, 640 + 60 * 16]
    first = step(2) | {"consumed_samples": 6, "tokens_per_second": 3 * 16 / 2}  # batches of 2 and 4
    later = [step(n) | {"consumed_samples": 4 * n - 2} for n in (3, 4)]
    assert curve([first, *later], "lm_loss", "tokens").x == [6 * 16, 10 * 16, 14 * 16]


def test_what_was_abandoned_by_a_step_back_is_omitted(tmp_path: Path) -> None:
    """The run stopped behind iteration 45, resumed from a checkpoint at 20, and is at 32 now."""
    abandoned = [step(30, 9.0), {"iteration": 30, "valid_loss": 8.0}, step(40, 9.0), step(45, 9.0)]
    kept = [{"iteration": 0, "valid_loss": 5.0}, step(10, 4.0), step(20, 3.0)]
    kept.append({"iteration": 20, "valid_loss": 3.5})
    repeated = [{"iteration": 25, "valid_loss": 2.5}, step(30, 2.0), {"iteration": 30, "valid_loss": 2.2}]
    file = tmp_path / "run.jsonl"

    def read(*lines: dict) -> list[dict]:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_metrics(str(file), pytest.fail)

    assert read(*kept, *abandoned) == kept + abandoned
    names = [name for record in read(*kept, *abandoned) for name in record]
    assert len(set(map(id, names))) == len(set(names))  # a file of a million records has each name once
    assert read(*kept, *abandoned, *repeated) == kept + repeated
    assert read(*kept, *abandoned, *repeated[1:]) == kept + repeated[1:]
    assert read(*kept, *abandoned, repeated[0]) == [*kept, repeated[0]]  # not yet at its first logged step
    # A run that has nothing left to do evaluates at its checkpoint, whose logged step stays.
    again = {"iteration": 20, "valid_loss": 3.5}
    assert read(*kept, *abandoned, again) == [*kept, again]
    # A run that stops logs the steps since the last logged one, after the evaluation at its last iteration.
    stopped = [repeated[0], step(25, 2.4)]
    assert read(*kept, *abandoned, *stopped, *repeated[1:]) == kept + stopped + repeated[1:]


def test_a_run_that_is_omitted_as_a_whole_is_told(tmp_path: Path) -> None:
    """Another run, or the same one after a kill before its first checkpoint, began in the same file."""
    start = {"iteration": 0, "valid_loss": 5.0}
    file, told = tmp_path / "run.jsonl", []
    lines = [start, step(10), step(20), start, step(10), step(20), step(30), step(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(str(file), told.append) == [start, start, step(10), step(20), step(30)]
    assert told == [f"{file}: lines before 4 are omitted: there the run began again, or another one"]


def test_smoothing_is_a_weighted_mean_of_the_past() -> None:
    values, weight = [4.0, 1.0, 7.0, 2.0], 0.75
    for last in range(len(values)):
        weights = weight ** np.arange(last, -1, -1)
        assert smoothed(values, weight)[last] == pytest.approx(
            np.average(values[: last + 1], weights=weights)
        )
    assert smoothed(values, 0.0) == values


def test_a_band_has_the_iterations_that_all_runs_logged() -> None:
    """On the time axis they are where they are in the mean, because no two runs take the same time."""
    fast = [step(1, 1.0, 2.0), step(2, 2.0, 2.0), step(3, 3.0, 2.0)]
    slow = [step(2, 4.0, 4.0), step(3, 5.0, 4.0), step(4, 6.0, 4.0)]
    found = band([fast, slow], "lm_loss", "iteration")
    assert (found.x, found.mean, found.least, found.most) == ([2, 3], [3.0, 4.0], [2.0, 3.0], [4.0, 5.0])
    hours = band([fast, slow], "lm_loss", "hours").x
    assert hours == pytest.approx([(4 + 4) / 2 / 3600, (6 + 8) / 2 / 3600])
    assert band([fast[:1], slow], "lm_loss", "hours").x == []
