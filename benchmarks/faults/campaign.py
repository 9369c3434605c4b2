"""Thousands of faults, in pieces that add up:

    python benchmarks/faults/campaign.py crashes --cases 9000 --directory /dev/shm/faults [--output DIRECTORY]

Every case is a run of pretrain_gpt.py, in forks of a process that has imported it, with one fault; it is
started again, the same command, until it is complete, and must end with the checkpoint of the undisturbed
run, bit for bit, after at most one line of error from each rank. Of `operations` it is a save, load, removal
or cache in one process. A case follows from --seed and its number, and
DIRECTORY/KIND.jsonl has one line for each case that was run, so that a campaign can be continued, and a
failure repeated with --only.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch

from benchmarks.common import program_parser, save_result
from benchmarks.faults.children import fork
from benchmarks.faults.crash_points import CrashPoints
from benchmarks.faults.disturbances import Disturbances
from benchmarks.faults.injection import preload
from benchmarks.faults.outcomes import GOOD
from benchmarks.faults.settings import ALONE, TOGETHER

# A case's number and the seed to fault, outcome and detail; None if there are no more cases.
Run = Callable[[int, int], tuple[str, str, str] | None]


def operations(directory: Path) -> Run:
    """Saves, loads, removals and caches, at each of their calls and in the order of the cases."""
    from benchmarks.faults.crash_operations import cases  # needs packages that other kinds do not

    return in_order(cases(directory))


def in_order(found: Iterator[tuple[str, Callable[[], tuple[str, str]]]]) -> Run:
    """Run one case after the other."""
    at = -1

    def run(number: int, seed: int) -> tuple[str, str, str] | None:
        nonlocal at
        for name, case in found:
            at += 1
            if at == number:
                outcome, detail = case()
                return name, outcome, detail
        return None

    return run


KINDS: dict[str, Callable[[Path], Run]] = {
    "operations": operations,
    # One rank: a call of start, load, save or rotation. Then the same on one rank of several.
    "crashes": lambda directory: CrashPoints(directory, ALONE).case,
    "ranks": lambda directory: CrashPoints(directory, TOGETHER).case,
    # Ranks, nodes and links that fail at a random moment.
    "processes": lambda directory: Disturbances(directory, TOGETHER).case,
}


def work(kind: str, options: argparse.Namespace, worker: int) -> None:
    """Every `workers`th case, from where an earlier session stopped."""
    directory = options.directory / f"{kind}-{worker}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    run, done = KINDS[kind](directory), options.directory / f"{kind}.jsonl"
    known = {json.loads(line)["case"] for line in done.read_text().splitlines()} if done.exists() else set()
    numbers = [options.only] if options.only is not None else range(0, options.cases, options.every)
    for at, number in enumerate(numbers):
        if number in known or at % options.workers != worker:
            continue
        if time.monotonic() > options.deadline:
            return
        began = time.monotonic()
        ended = run(number, options.seed)
        if ended is None:
            return
        fault, outcome, detail = ended
        line = {"case": number, "fault": fault, "outcome": outcome, "seconds": time.monotonic() - began}
        if outcome not in GOOD:
            line["detail"] = detail
            print("FAILURE", fault, outcome, detail, flush=True)
        with done.open("a") as file:
            file.write(json.dumps(line) + "\n")


def figures(kind: str, options: argparse.Namespace) -> dict[str, object]:
    """All cases so far."""
    lines = (options.directory / f"{kind}.jsonl").read_text().splitlines()
    ran = [json.loads(line) for line in lines]
    outcomes = Counter(f"{case['fault']}: {case['outcome']}" for case in ran)
    return {
        "seed": options.seed,
        "cases": len(ran),
        "seconds": round(sum(case["seconds"] for case in ran)),
        "faults": dict(sorted(Counter(case["fault"] for case in ran).items())),
        "outcomes": dict(sorted(outcomes.items())),
        "failures": [case for case in ran if case["outcome"] not in GOOD],
    }


def main() -> int:
    parser = program_parser(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="of the cases, run every Nth")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many, and continue later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--directory", type=Path, required=True, help="runs and KIND.jsonl; a tmpfs is quick")
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    options.directory.mkdir(parents=True, exist_ok=True)
    if (status := preload(options.directory, [__file__, *sys.argv[1:]])) is not None:
        return status
    log = options.directory / f"{options.kind}.log"
    if options.only is not None:
        options.workers = 1
    workers = range(options.workers)
    processes = [fork(partial(work, options.kind, options, at), log, log) for at in workers]
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()
        raise
    found = figures(options.kind, options)
    print(json.dumps({name: found[name] for name in ("cases", "seconds", "outcomes")}, indent=2))
    if options.output:
        save_result(f"faults_{options.kind}_{options.seed}", found, options.output)
    return 1 if any(process.exitcode for process in processes) or found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
