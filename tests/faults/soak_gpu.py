"""A run on a GPU that saves every few seconds and evaluates, and what it holds from interval to interval.

    python tests/faults/soak_gpu.py --minutes 20 --directory /tmp/soak_gpu --output benchmarks/results

One process of `pretrain_gpt.py` with --async-save and the ZeRO stage 3 of one rank, until
--exit-duration-in-mins. Of each interval of the log it keeps the bytes of tensors on the GPU, their peak, and
of the process its private memory, descriptors and threads. The exit status is 0 where, after two minutes,
neither figure of the GPU ever changed, to the byte.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from the root, not installed

from benchmarks.common import RESULTS, save_result  # noqa: E402

WARM_UP = 120  # seconds in which a run may still grow
EVERY = 0.5  # seconds between two looks at the log
FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 16 "
    "--bf16 --zero-stage 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --lr 1e-4 "
    "--train-iters 100000000 --lr-decay-iters 100000000 --log-interval 100 "
    "--eval-interval 150 --eval-iters 5 --save-interval 200 --async-save --keep-last 2"
)
HELD = ("anonymous_kib", "descriptors", "threads")
ON_GPU = ("memory_allocated_bytes", "memory_peak_bytes")


def held(pid: int) -> dict[str, int]:
    """Private memory in KiB, descriptors and threads of a process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def soak(directory: Path, minutes: float) -> dict[str, Any]:
    """One run, observed to its end."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics, log = directory / "metrics.jsonl", directory / "log.txt"
    argv = f"{FLAGS} --save {directory / 'checkpoints'} --metrics-file {metrics}".split()
    argv += ["--exit-duration-in-mins", str(minutes)]
    began, samples = time.monotonic(), []
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *argv], cwd=ROOT, stdout=file, stderr=file
        )
        seen = 0
        while process.poll() is None:
            time.sleep(EVERY)
            records = _records(metrics)
            if len(records) > seen:
                seen = len(records)
                try:
                    samples.append({"seconds": time.monotonic() - began, **records[-1], **held(process.pid)})
                except (FileNotFoundError, KeyError):  # it has just ended
                    break
    process.wait()
    warm = [sample for sample in samples if sample["seconds"] > WARM_UP]
    lines = log.read_text().splitlines()
    ends = {"first": warm[: len(warm) // 4], "last": warm[-len(warm) // 4 :]}
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "status": process.returncode,
        "saves": sum(line.startswith(" saved ") for line in lines),
        "evaluations": sum(" loss at " in line for line in lines),
        "intervals": len(warm),
        "bytes_on_gpu": {name: sorted({sample[name] for sample in warm}) for name in ON_GPU},
        **{name: {kind: _median(part, kind) for kind in HELD} for name, part in ends.items()},
        "last_line": lines[-1] if lines else "",
    }


def _records(metrics: Path) -> list[dict[str, Any]]:
    """Whole lines of the file of metrics that are of a training interval."""
    if not metrics.exists():
        return []
    whole = metrics.read_text().rpartition("\n")[0].splitlines()
    return [record for record in map(json.loads, whole) if "elapsed_ms" in record]


def _median(samples: list[dict[str, Any]], kind: str) -> int | None:
    values = sorted(sample[kind] for sample in samples)
    return values[len(values) // 2] if values else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--directory", type=Path, required=True, help="checkpoints, log and metrics; kept")
    parser.add_argument("--name", default="soak_gpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = soak(options.directory, options.minutes)
    written = save_result(options.name, {"flags": FLAGS, **found}, options.output)
    print(json.dumps(found, indent=1), f"written to {written}", sep="\n")
    flat = all(len(values) == 1 for values in found["bytes_on_gpu"].values())
    return 0 if flat and found["status"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
