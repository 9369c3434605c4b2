"""Pairs of runs with equal seeds, side by side; each finished run is a line of a file."""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, STOPPED, commit, save_result
from benchmarks.contest.grid import visible_gpus
from benchmarks.intervals import mean_and_interval

Job = tuple[str, int]  # name of a run, seed
Run = dict[str, Any]  # its figures
_MARGIN = 1.2  # of what the longest run took


def campaign_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all campaigns have."""
    parser.add_argument("--pairs", type=int, default=16, help="seeds, from 0 on")
    parser.add_argument("--processes", type=int, default=1, help="runs side by side, spread over all GPUs")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--name", help="of the result; default: of what the runs are")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--runs-file", type=Path, help="default NAME.jsonl in a folder of build/")


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """A campaign whose runs are named by `key`: all that decides the bits of a run.

    `run(job)` returns a run's figures, `loss`, `skipped` and `seconds` among them, in one of --processes
    processes of so many `threads`, which call `prepare` first; both are pickled. Process i sees one GPU, that
    of index i modulo their number, if --device is cuda. A run's line has its key, name and seed beside these.
    """

    options: argparse.Namespace  # of campaign_arguments, and the device
    settings: dict[str, Any]  # that all runs have
    key: Callable[[str, int], str]
    run: Callable[[Job], Run]
    threads: int = 1
    prepare: Callable[[], object] = int
    started: float = field(default_factory=lambda: time.monotonic())  # when the limit began to run

    def complete(
        self,
        names: Sequence[str],
        known: Sequence[str],
        kind: str,
        more: Callable[[str, Sequence[Run], Sequence[Run]], dict[str, Any]],
        table: Callable[[dict[str, Any]], str],
    ) -> int:
        """Run what is missing of `names`, whose first is the baseline, and write and print a result.

        The result has a row for each of the `known` names with pairs, also those of earlier calls. `kind`
        names these rows, and `more` (name, runs, baselines) returns what they have beside the usual figures.
        Returns the exit status.
        """
        options, done = self.options, self.finished(known.__contains__)
        if lost := loses_pairs(options.output / f"{options.name}.json", kind, self.settings, done):
            print(f"{Path(sys.argv[0]).name}: error: {lost}", file=sys.stderr)
            return 2
        jobs = [(name, seed) for seed in range(options.pairs) for name in names]
        there = sum(job in done for job in jobs)
        print(f"{there} of {len(jobs)} runs are in {options.runs_file}", flush=True)
        finished = there == len(jobs) or self.run_missing(lambda: jobs, done)
        rows: dict[str, Any] = {}
        for name in known:
            seeds = [seed for run, seed in sorted(done) if run == name and (names[0], seed) in done]
            if seeds:
                runs, baselines = ([done[each, seed] for seed in seeds] for each in (name, names[0]))
                losses = [run["loss"] for run in runs]
                rows[name] = {
                    "pairs": len(seeds),
                    "gap": gaps_of(losses, [run["loss"] for run in baselines]),
                    "losses": dict(zip(seeds, losses, strict=True)),
                    "skipped_steps": sum(run["skipped"] for run in runs),
                    "seconds": round(sum(run["seconds"] for run in runs) / len(seeds), 1),
                    **more(name, runs, baselines),
                }
        figures = {"settings": self.settings, kind: rows}
        written = save_result(options.name, figures, options.output)
        print(table(figures), f"written to {written}", sep="\n")
        return 0 if finished else STOPPED

    def finished(self, named: Callable[[str], bool]) -> dict[Job, Run]:
        """The finished runs with such names and today's keys. A line that was cut off is removed."""
        path = self.options.runs_file
        if not path.exists():
            return {}
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(path, len(whole))
        runs = {}
        for line in whole.splitlines():
            run = json.loads(line)
            job = run["name"], run["seed"]
            if named(run["name"]) and run["key"] == self.key(*job):
                runs[job] = run
        return runs

    def run_missing(self, wanted: Callable[[], Sequence[Job]], done: dict[Job, Run]) -> bool:
        """Run what is `wanted` and not `done`, seed by seed, and add it; False if the limit ended it.

        `wanted` is asked again when runs have ended. A seed is begun only if all of its runs can end in time,
        so calls end with whole pairs.
        """
        longest = max((run["seconds"] for run in done.values()), default=0.0)
        under_way: dict[Future[Run], Job] = {}
        processes, on_gpu = self.options.processes, self.options.device == "cuda"
        self.options.runs_file.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        numbers = context.SimpleQueue()
        for number in range(processes):
            numbers.put(number)
        begin = visible_gpus() if on_gpu else None, numbers, self.threads, self.prepare
        with ProcessPoolExecutor(processes, context, begin_process, begin) as pool:
            while True:
                running = set(under_way.values())
                missing = [job for job in wanted() if job not in done and job not in running]
                if not missing and not under_way:
                    return True
                waiting = _begun_first(missing, (*done, *running))
                left = self.options.limit_seconds - (time.monotonic() - self.started)
                begun = {seed for _, seed in (*done, *under_way.values())}
                while (
                    waiting
                    and len(under_way) < processes
                    and left > _MARGIN * longest * rounds_needed(waiting, begun, len(under_way), processes)
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

    def _append(self, run: Run) -> None:
        with self.options.runs_file.open("a") as file:
            file.write(json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())


def begin_process(
    gpus: Sequence[str] | None, numbers: SimpleQueue[int], threads: int, prepare: Callable[[], object]
) -> None:
    """Prepare a process of the pool, and give it its GPU before it uses CUDA; `numbers` has one for each.

    `gpus`, as in CUDA_VISIBLE_DEVICES, is None on CPUs.
    """
    import torch

    number = numbers.get()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    torch.set_num_threads(threads)
    prepare()
    if gpus is not None:
        torch.cuda.init()


def key_of(*decisive: Any) -> str:
    """A name for a run by all that decides its bits, as JSON."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:20]


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
