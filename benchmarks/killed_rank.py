"""How soon all ranks know of a rank that was killed: `python benchmarks/killed_rank.py [--kills 40]`.

launch/emulate_nodes.sh starts torchrun on two emulated nodes of two ranks each, which needs root. One of the
ranks gets SIGKILL while the ranks start, in a step, in a save or in an evaluation. The seconds from the kill
are those to the last error line of the remaining ranks, to the end of the last rank, and to the end of both
torchruns. A kill in the start hits a rank that has connected to the store.
"""

import argparse
import itertools
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result

ROOT = RESULTS.parents[1]
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --num-workers 1 "
    "--train-iters 100000 --log-interval 1 --zero-stage 3"
).split()
MOMENTS = {
    "start": "--eval-iters 0",
    "step": "--eval-iters 0",
    "save": "--eval-iters 0 --save-interval 1 --keep-last 2",
    "evaluation": "--eval-iters 100000",
}
PATIENCE = 200.0  # seconds


@dataclass
class Kill:
    """The moment, the rank, what was measured, and what rank 0 or else rank 1 said."""

    moment: str
    rank: int
    to_last_line: float | None = None
    to_last_end: float | None = None
    to_launchers_end: float | None = None
    lines: int = 0
    said: str = ""
    load: float = 0.0


@dataclass
class Output:
    """The lines of a run, each with the time when it came; threads add to it."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def has(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for _, line in list(self.lines))


def wait_until(condition: Callable[[], object], run: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run has ended, or takes too long, before {what}")
        time.sleep(0.005)


def ranks_of(run: int) -> dict[int, int]:
    """The process of each rank that torchrun has started so far; a rank's own children are left out."""
    found, parents = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"EMULATE_NODES={run}".encode() not in variables:
                continue
            pid = int(process.name)
            parents[pid] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            rank = next((value[5:] for value in variables if value.startswith(b"RANK=")), None)
            if rank is not None:
                found[pid] = int(rank)
    return {rank: pid for pid, rank in found.items() if parents[pid] not in found}


def is_connected(pid: int) -> bool:
    """Whether a process has an established TCP connection."""
    with suppress(OSError):
        inodes = {
            row[9]
            for row in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
            if row[3] == "01"
        }
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).removeprefix("socket:[").rstrip("]") in inodes:
                    return True
    return False


@contextmanager
def started(flags: list[str]) -> Iterator[tuple[subprocess.Popen[str], Output]]:
    command = [str(ROOT / "launch/emulate_nodes.sh"), "--nodes", "2", "--ranks-per-node", "2", "--"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.Popen(
        [*command, "pretrain_gpt.py", *MODEL, *flags],
        cwd=ROOT,
        env=kept | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = Output()
    reader = threading.Thread(target=output.read, args=(run.stdout,), daemon=True)
    reader.start()
    try:
        yield run, output
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()
        reader.join(10)


def seconds_until_ended(pids: list[int], since: float) -> float | None:
    """Until the last of the processes has ended; None if one does not in time."""
    poll, last = select.poll(), since
    waiting = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            waiting.add(descriptor)
            poll.register(descriptor, select.POLLIN)
    while waiting:
        left = since + PATIENCE - time.monotonic()
        if left <= 0:
            return None
        for descriptor, _ in poll.poll(left * 1000):
            poll.unregister(descriptor)
            os.close(descriptor)
            waiting.remove(descriptor)
            last = time.monotonic()
    return round(last - since, 3)


def measure(moment: str, rank: int, generator: random.Random) -> Kill:
    kill = Kill(moment, rank)
    with tempfile.TemporaryDirectory() as directory:
        flags = MOMENTS[moment].split()
        if moment == "save":
            flags += ["--save", directory]
        with started(flags) as (run, output):
            await_moment(moment, rank, run, output, Path(directory), generator)
            pids = ranks_of(run.pid)
            kill.load = os.getloadavg()[0]
            since = time.monotonic()
            os.kill(pids.pop(rank), signal.SIGKILL)
            kill.to_last_end = seconds_until_ended(list(pids.values()), since)
            with suppress(subprocess.TimeoutExpired):
                run.wait(PATIENCE)
                kill.to_launchers_end = round(time.monotonic() - since, 3)
    lines = [(when, line) for when, line in output.lines if when > since and ": error: " in line]
    if lines:
        kill.to_last_line = round(max(when for when, _ in lines) - since, 3)
    kill.lines, kill.said = len(lines), "; ".join(sorted({line.split(": error: ")[1] for _, line in lines}))
    return kill


def await_moment(
    moment: str,
    rank: int,
    run: subprocess.Popen[str],
    output: Output,
    directory: Path,
    generator: random.Random,
) -> None:
    """Wait for a random time within the moment."""
    if moment == "start":
        wait_until(lambda: len(ranks_of(run.pid)) == 4, run, "all ranks started")
        pid = ranks_of(run.pid)[rank]
        wait_until(lambda: is_connected(pid), run, f"rank {rank} connected")
        time.sleep(generator.random())
        return
    wait_until(lambda: output.has("starting from initial weights"), run, "the first step")
    if moment == "evaluation":
        time.sleep(1 + generator.random())
        return
    wait_until(lambda: output.has(r"iteration +3/"), run, "the third step")
    time.sleep(generator.random())
    if moment == "save":
        before = set(directory.iterdir())
        wait_until(lambda: set(directory.iterdir()) - before, run, "a save")


def figures_of(kills: list[Kill]) -> dict[str, Any]:
    """Medians and maxima in seconds, and all kills; a rank that did not end in time is counted."""

    def summary(chosen: list[Kill]) -> dict[str, Any]:
        row: dict[str, Any] = {"kills": len(chosen)}
        for name in ("to_last_line", "to_last_end", "to_launchers_end"):
            seconds = [value for kill in chosen if (value := getattr(kill, name)) is not None]
            row[name] = {
                "median": round(median(seconds), 3) if seconds else None,
                "max": max(seconds, default=None),
                f"none in {PATIENCE:g} s": len(chosen) - len(seconds),
            }
        return row

    names = {kill.moment for kill in kills}
    return {
        "all": summary(kills),
        "by moment": {
            name: summary([kill for kill in kills if kill.moment == name])
            for name in MOMENTS
            if name in names
        },
        "by rank": {rank: summary([kill for kill in kills if kill.rank == rank]) for rank in range(4)},
        "each": [asdict(kill) for kill in kills],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="killed_rank", help="of the result")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    kills = []
    for moment, rank in itertools.islice(
        itertools.cycle(itertools.product(options.moments, range(4))), options.kills
    ):
        kills.append(measure(moment, rank, generator))
        print(kills[-1], flush=True)
    write_result(options.name, figures_of(kills), options.output)


if __name__ == "__main__":
    main()
