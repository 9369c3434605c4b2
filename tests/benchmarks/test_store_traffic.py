"""Requests of 64 ranks to their store: a constant number by each rank, and a few per rank by rank 0.

The benchmark simulates the ranks with the program's own code. It runs in a network namespace, where names are
not looked up, or connections would take seconds.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, environment

RANKS = 64
PER_SECOND = 4  # requests of a rank: 2 heartbeats, a wait's look at the progress, and a report of it
# What a rank sends in each phase apart from these.
START, SAVE, END = 40, 9, 3
# Rank 0 waits for the addresses with two requests a time, after pauses that grow from 0.01 to 0.5 s by half.
POLLS = 2 * math.ceil(math.log(0.5 / 0.01, 1.5))
# Its first round of heartbeats makes a key for each rank.
ROOT_START = RANKS + 56 + POLLS


def namespace() -> list[str]:
    """The beginning of a command that runs a program in a network namespace of its own."""
    own = ["unshare", "--net", "--map-root-user", "--user"]
    probe = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"needs network namespaces: {probe.stderr.strip()}")
    return [*own, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.mark.nightly
def test_requests_of_a_rank_do_not_grow_with_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/store_traffic.py", "--ranks", str(RANKS), "--processes", "2"]
    command += ["--spread", "0.2", "--heartbeats", "1", "--write-seconds", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [*namespace(), *command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    phases = json.loads((tmp_path / "store_traffic.json").read_text())["figures"]["ranks"][str(RANKS)]
    limits = {
        "start": (START, ROOT_START),
        "heartbeats": (2, 2),
        "save 0": (SAVE, SAVE + 3),
        "end": (END, END + 3),
    }
    for name, (of_a_rank, of_rank_0) in limits.items():
        phase = phases[name]
        timed = PER_SECOND * phase["seconds"]
        assert phase["requests_of_a_rank"] <= of_a_rank + timed, name
        assert phase["requests_of_rank_0"] <= of_rank_0 + timed, name
