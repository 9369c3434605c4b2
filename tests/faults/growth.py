"""How the memory of two ranks grows with the number of saves; a tiny model that saves every fourth step:

    [MALLOC_ARENA_MAX=1] python tests/faults/growth.py --seconds 240 --directory /dev/shm/growth [--output D]

`in_use_kib` is what malloc has given out. It reads MALLOC_ARENA_MAX when a process starts.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch

import tests.preloaded  # noqa: F401 - before ranks are forked
from benchmarks.common import write_result
from tests.children import Job
from tests.faults.held import report_in_use
from tests.faults.soak import held

RANKS = 2
EVERY = 2.0  # seconds between two looks
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 100000000 --lr-decay-iters 100000000 --device cpu "
    "--heartbeat-timeout 500 --save-interval 4 --keep-last 2 --eval-iters 0 --log-interval 1000 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --mock-data --num-workers 0 --zero-stage 3 --bf16"
)


def grow(directory: Path, seconds: float) -> list[dict[str, Any]]:
    """What the ranks hold after so many saves."""
    shutil.rmtree(directory, ignore_errors=True)
    log = directory / "log"
    reports = [log / f"{rank}.in_use" for rank in range(RANKS)]
    argv = [*FLAGS.split(), "--save", str(directory / "checkpoints")]
    argv += ["--exit-duration-in-mins", str(seconds / 60)]
    job = Job(log, argv, RANKS, prepare=lambda rank: report_in_use(reports[rank], EVERY))
    samples: list[dict[str, Any]] = []
    while not job.wait(EVERY):
        try:
            ranks = [held(pid, report) for pid, report in zip(job.pids, reports, strict=True)]
        except (OSError, KeyError, ValueError, IndexError):  # it starts, or one has just ended
            continue
        saves = sum(line.startswith(" saved ") for line in job.log(0).splitlines())
        if saves >= (samples[-1]["saves"] + 25 if samples else 1):
            samples.append({"saves": saves, "ranks": ranks})
    assert set(job.statuses.values()) == {0}, job.log(0)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240, help="of the run")
    parser.add_argument("--directory", type=Path, required=True, help="checkpoints, logs; a tmpfs is quick")
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = "one arena" if os.environ.get("MALLOC_ARENA_MAX") == "1" else "arenas"
    began = time.monotonic()
    figures = {"samples": grow(options.directory, options.seconds), "seconds": time.monotonic() - began}
    print(figures["samples"][-1] if figures["samples"] else "nothing saved")
    if options.output:
        write_result(f"save_memory_{name.replace(' ', '_')}", figures, options.output)


if __name__ == "__main__":
    main()
