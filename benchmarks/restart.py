"""How long a killed run takes until its next step: `python benchmarks/restart.py [--runs 3] [--processes 2]`.

launch/local.sh runs a small model with --max-restarts and --async-save; once it has saved, a rank is killed.
The time is that from the kill to the first logged step of the new processes: noticing, ending the
others, starting python and torch, joining, loading, and the step itself.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 --train-iters 100000 "
    "--log-interval 1 --eval-iters 0 --save-interval 5 --async-save --keep-last 2 --zero-stage 3"
).split()


def wait_for(pattern: str, lines: IO[str]) -> str:
    """The first line that matches. Ends the benchmark if the run ends earlier."""
    for line in lines:
        if re.search(pattern, line):
            return line
    raise SystemExit(f"the run ended before it said {pattern!r}")


def seconds_to_the_next_step(processes: int) -> float:
    """Seconds from the kill of a rank of a run to the next step."""
    with tempfile.TemporaryDirectory() as save:
        argv = ["launch/local.sh", "-n", str(processes), "--max-restarts", "1", "pretrain_gpt.py", *FLAGS]
        run = subprocess.Popen(
            [*argv, "--save", save, "--load", save],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHON": sys.executable},
        )
        assert run.stdout is not None
        wait_for(r"saved .*iter_", run.stdout)
        ranks = subprocess.run(
            ["pgrep", "-f", f"pretrain_gpt.py.*--save {save}"], capture_output=True, text=True, check=True
        )
        victims = [pid for pid in map(int, ranks.stdout.split()) if pid != run.pid]
        started = time.perf_counter()
        os.kill(victims[-1], signal.SIGKILL)
        wait_for(r"loaded .*resuming at iteration", run.stdout)
        wait_for(r"iteration +\d+/", run.stdout)
        seconds = time.perf_counter() - started
        run.send_signal(signal.SIGTERM)
        run.communicate()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    seconds = [round(seconds_to_the_next_step(options.processes), 2) for _ in range(options.runs)]
    figures = {"processes": options.processes, "seconds": seconds, "median_seconds": median(seconds)}
    write_result("restart", figures, options.output)


if __name__ == "__main__":
    main()
