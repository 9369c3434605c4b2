"""Fuzzes the readers of files: `python benchmarks/faults/fuzz.py --seconds 1200`.

A changed file must be read, or refused by a ValueError or OSError that names the file or its flag. Anything
else is a failure: another exception, more than 5 seconds, more than a GiB of memory, the end of the process.
Each reader runs in a process of its own; the files of a failure are kept.
"""

import argparse
import contextlib
import faulthandler
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.common import RESULTS, ROOT, program_parser, save_result
from benchmarks.faults.readers import READERS, Reader

SECONDS_OF_ONE = 5  # of processor time
BYTES_OF_ONE = 1 << 30
_BATCH = 1000


class Hang(BaseException):
    """A reader took too long."""


def fuzz(reader: Reader, directory: Path, examples: int, number: int) -> Counter[str]:
    """Runs `examples` changed inputs, which follow from `number`. Raises what is a failure, shrunk.

    Returns how many there were, and how many of them were read and refused.
    """
    execute, counts = reader.make(directory), Counter[str]()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(reader.changes)
    def run(changes: Any) -> None:
        counts["executions"] += 1
        try:
            with _limit():
                execute(changes)
        except (ValueError, OSError) as error:
            if str(directory) not in str(error) and "--" not in str(error):
                raise AssertionError(f"names neither file nor flag: {error!r}") from error
            counts["refused"] += 1
        else:
            counts["read"] += 1

    with _memory():
        run()
    return counts


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    """End what takes too long: by an exception in Python, or a little later by ending the process."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"more than {SECONDS_OF_ONE} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_ONE)
    faulthandler.dump_traceback_later(12 * SECONDS_OF_ONE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Limit this process to one GiB more than it uses."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (held,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES_OF_ONE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _work(reader: Reader, seconds: float, first: int, directory: Path) -> None:
    """Batches until the time is over; a line of JSON after each."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        started = time.monotonic()
        counts = fuzz(reader, directory, _BATCH, number)
        print(json.dumps({**counts, "seconds": time.monotonic() - started}), flush=True)
        number += 1


def _supervise(reader: Reader, seconds: float, first: int, kept: Path) -> dict[str, Any]:
    """Run workers for so long; replace a failed one by another with other numbers."""
    total, failures = Counter[str](), list[dict[str, Any]]()
    end, number = time.monotonic() + seconds, first
    while (left := end - time.monotonic()) > 0 and len(failures) < 20:
        with tempfile.TemporaryDirectory() as directory:
            command = ["--reader", reader.name, "--seconds", str(left), "--seed", str(number)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.faults.fuzz", *command, "--directory", directory],
                cwd=ROOT,
                capture_output=True,
                text=True,
                errors="replace",
            )
            batches = [json.loads(line) for line in done.stdout.splitlines()]
            for batch in batches:
                total.update(batch)
            number += len(batches) + 1
            if done.returncode:
                copy = kept / f"{reader.name.replace(' ', '-')}-{len(failures)}"
                shutil.copytree(directory, copy)
                (copy / "stderr.txt").write_text(done.stderr)
                failures.append({"seed": number - 1, "status": done.returncode, "files": str(copy)})
                print(f"{reader.name}: FAILED, see {copy}", flush=True)
    return {name: round(total[name]) for name in ("executions", "read", "refused", "seconds")} | {
        "failures": failures
    }


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", choices=[reader.name for reader in READERS], help="this one alone")
    parser.add_argument("--kept", type=Path, default=Path("build/fuzzing"), help="where files of failures go")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # makes this process a worker
    arguments = parser.parse_args()
    chosen = [reader for reader in READERS if arguments.reader in (None, reader.name)]
    if arguments.directory:
        _work(chosen[0], arguments.seconds, arguments.seed, arguments.directory)
        return
    share = arguments.seconds / len(chosen)
    figures = {reader.name: _supervise(reader, share, arguments.seed, arguments.kept) for reader in chosen}
    total = {name: sum(each[name] for each in figures.values()) for name in ("executions", "seconds")}
    failures = sum(len(each["failures"]) for each in figures.values())
    result = {"total": total | {"failures": failures}, "readers": figures}
    print(json.dumps(result, indent=2))
    print(f"written to {save_result('fuzzing', result, arguments.output)}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
