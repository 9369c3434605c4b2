"""Injects faults into real runs and compares what they end with to the runs that nobody disturbed.

    python tests/faults/harness.py --seconds 120 --seed 1 [--output benchmarks/results]

A case is a run of 2 or 4 ranks over gloo at some stage, precision and way of saving, and a fault at a random
moment: a rank is killed, stopped or signalled, its disk is full or read-only. The run is started again, the
same command, until it is complete (at most `STARTS` times). It must end with the SHA-256 of the checkpoint of
the undisturbed run. Saves are also cut, by SIGKILL or an errno, at each of their calls on files (calls.c
is preloaded for that), and files of every kind are changed (flips.py).
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch

import tests.preloaded  # noqa: F401 - before ranks are forked
from benchmarks.common import write_result
from tests.faults.cut_saves import cut_saves
from tests.faults.disturbed_runs import Cases
from tests.faults.flip_targets import TARGETS
from tests.faults.flips import flip
from tests.faults.injection import preload
from tests.faults.tally import Tally


def _flip(directory: Path, tally: Tally, options: argparse.Namespace) -> None:
    """Change files of every kind, and add up what became of it."""
    (directory / "flips").mkdir()
    every = range(len(TARGETS))
    found = flip(directory / "flips", options.flips, options.seed, targets=every, batch_size=20)
    for name, count in found["outcomes"].items():
        tally.faults[name.partition(":")[0]] += count
        tally.outcomes[name] += count
    tally.failures += map(json.dumps, found["failures"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="of disturbed runs; one of each fault at least"
    )
    parser.add_argument("--cut-seconds", type=float, default=60, help="of saves that are cut")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, draw = Tally(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if (status := preload(directory, [__file__, *sys.argv[1:]])) is not None:
            return status
        began = time.monotonic()
        _flip(directory, tally, options)
        cut_saves(directory, tally, options.cut_seconds)
        cases, deadline = Cases(directory, draw, tally), time.monotonic() + options.seconds
        cases.one_of_each()
        while time.monotonic() < deadline:
            cases.one()
    figures = {
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
        "faults": dict(tally.faults),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "failures": tally.failures,
    }
    print(json.dumps(figures, indent=2))
    if options.output:
        write_result(f"faults_{options.seed}", figures, options.output)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
