"""Pairs of runs with equal seeds, side by side; each finished run is a line of a file."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from benchmarks.common import commit
from benchmarks.intervals import mean_and_interval

Job = tuple[str, int]  # name of a run, seed
_MARGIN = 1.2  # of what the longest run took


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """A campaign whose runs are named by `key`: all that decides the bits of a run.

    `run(job)` returns a run's figures, `seconds` among them, in one of `processes` processes that `prepare`
    has prepared; both are pickled. Process i sees one of `gpus`, the one of index i modulo their number, if
    there are any. A run's line has its key, name and seed beside these.
    """

    path: Path
    key: Callable[[str, int], str]
    run: Callable[[Job], dict[str, Any]]
    prepare: Callable[[], None]
    processes: int
    gpus: Sequence[str]  # as in CUDA_VISIBLE_DEVICES
    limit_seconds: float
    started: float  # of time.monotonic(): when the limit began to run

    def finished(self, named: Callable[[str], bool]) -> dict[Job, dict[str, Any]]:
        """The finished runs with such names and today's keys. A line that was cut off is removed."""
        if not self.path.exists():
            return {}
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        runs = {}
        for line in whole.splitlines():
            run = json.loads(line)
            job = run["name"], run["seed"]
            if named(run["name"]) and run["key"] == self.key(*job):
                runs[job] = run
        return runs

    def run_missing(self, wanted: Callable[[], Sequence[Job]], done: dict[Job, dict[str, Any]]) -> bool:
        """Run what is `wanted` and not `done`, seed by seed, and add it; False if the limit ended it.

        `wanted` is asked again when runs have ended. A seed is begun only if all of its runs can end in time,
        so calls end with whole pairs.
        """
        longest = max((run["seconds"] for run in done.values()), default=0.0)
        under_way: dict[Future[dict[str, Any]], Job] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        numbers = context.SimpleQueue()
        for number in range(self.processes):
            numbers.put(number)
        begin = self.prepare, self.gpus, numbers
        with ProcessPoolExecutor(self.processes, context, begin_process, begin) as pool:
            while True:
                running = set(under_way.values())
                missing = [job for job in wanted() if job not in done and job not in running]
                if not missing and not under_way:
                    return True
                waiting = _begun_first(missing, (*done, *running))
                left = self.limit_seconds - (time.monotonic() - self.started)
                begun = {seed for _, seed in (*done, *under_way.values())}
                while (
                    waiting
                    and len(under_way) < self.processes
                    and left
                    > _MARGIN * longest * rounds_needed(waiting, begun, len(under_way), self.processes)
                ):
                    job = waiting.pop(0)
                    begun.add(job[1])
                    under_way[pool.submit(self.run, job)] = job
                if not under_way:
                    return False
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    name, seed = job = under_way.pop(future)
                    run = {"key": self.key(name, seed), "name": name, "seed": seed, "commit": commit()}
                    done[job] = run | future.result()
                    self._append(done[job])
                    longest = max(longest, done[job]["seconds"])
                    print(
                        f"{name}, seed {seed}: {done[job]['loss']:.5f} after {done[job]['seconds']} s",
                        flush=True,
                    )

    def _append(self, run: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())


def begin_process(prepare: Callable[[], None], gpus: Sequence[str], numbers: SimpleQueue[int]) -> None:
    """Give a process of the pool its GPU, before it uses CUDA, and prepare it; `numbers` has one for each."""
    number = numbers.get()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    prepare()


def loses_pairs(result: Path, rows: str, settings: dict[str, Any], done: Collection[Job]) -> str | None:
    """Why a result that is made from `done`, and from runs to come, could lose pairs that `result` has.

    None if it cannot: there is no such result, or it has these settings and none but these runs. `rows` names
    its figures by run.
    """
    if not result.exists():
        return None
    figures = json.loads(result.read_text())["figures"]
    if not figures[rows]:
        return None
    if figures["settings"] != json.loads(json.dumps(settings)):
        return f"{result} has runs with other settings: give another --name"
    for name, row in figures[rows].items():
        missing = sum((name, int(seed)) not in done for seed in row["losses"])
        if missing:
            return (
                f"{result} has {row['pairs']} pairs of {name!r}, of which --runs-file lacks {missing}: name "
                "the file that has them, or give another --name"
            )
    return None


def _begun_first(missing: Sequence[Job], done: Iterable[Job]) -> list[Job]:
    begun = {seed for _, seed in done}
    return sorted(missing, key=lambda job: (job[1] not in begun, job[1]))


def rounds_needed(waiting: Sequence[Job], begun: Collection[int], under_way: int, processes: int) -> int:
    """How many runs long the next job takes: the first of a seed needs the time of all runs of the seed."""
    seed = waiting[0][1]
    if seed in begun:
        return 1
    runs = sum(other == seed for _, other in waiting)
    return -(-(under_way + runs) // processes)


def gaps_of(losses: Sequence[float], baselines: Sequence[float]) -> dict[str, Any]:
    """Percent by which losses are above the baselines of their seeds: the mean, its 95% interval, each."""
    gaps = [100 * (loss / baseline - 1) for loss, baseline in zip(losses, baselines, strict=True)]
    mean, half_width = mean_and_interval(gaps)
    return {
        "mean_percent": round(mean, 4),
        "half_width_95_percent": None if half_width is None else round(half_width, 4),
        "by_seed": [round(gap, 4) for gap in gaps],
    }


def gap_cells(gap: dict[str, Any]) -> str:
    """Three cells of a table row for `gaps_of`: the mean, the half-width of its interval, least … most."""
    half = "" if gap["half_width_95_percent"] is None else f"{gap['half_width_95_percent']:.3f}"
    spread = f"{min(gap['by_seed']):+.3f} … {max(gap['by_seed']):+.3f}"
    return f"{gap['mean_percent']:+.3f} | {half} | {spread}"
