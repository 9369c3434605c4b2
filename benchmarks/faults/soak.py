"""Runs that save every few seconds for hours, and what they hold: memory, descriptors, threads, disk.

Of memory there are two figures. What the kernel holds for a rank also grows by fragmentation: short-lived
threads take turns in the arenas of malloc, each of which keeps what it once needed. What the allocators have
given out grows by a leak alone. The verdict on a piece tells the two apart.

    python benchmarks/faults/soak.py --minutes 80 --directory /tmp/soak [--output benchmarks/results]

A piece is a run of two ranks that resumes where the last piece of its setting ended, and stops by
--exit-duration-in-mins. The pieces alternate between `SETTINGS`. Each piece is added to
DIRECTORY/pieces.jsonl, and the result holds all of that file, so that a soak may be continued later.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch

from benchmarks.common import commit, write_result
from benchmarks.faults.children import Job
from benchmarks.faults.held import report_in_use

RANKS = 2
EVERY = 5  # seconds between two looks at the processes
WARM_UP = 120  # seconds in which a run may still grow
LEAK = 16 * 2**10  # bytes in use per save; less is noise in a piece of some minutes
LEAKED_BLOCKS = 50  # the same for the blocks of Python's allocator, of about 80 bytes
LEAST = ("in_use_kib", "python_blocks")
SAVES = "--save-interval 8 --eval-interval 100 --eval-iters 2 --log-interval 100"
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 100000000 --lr-decay-iters 100000000 --device cpu "
    f"--heartbeat-timeout 500 {SAVES} --tokenizer-type NullTokenizer --vocab-size 255"
)
MOCK = "--mock-data --num-workers 0"
TEXT = (
    "--data-path {directory}/text.jsonl --split 90,10,0 --num-workers 1 --data-cache-path {directory}/cache"
)
SETTINGS = {
    "stage 3, bf16, async": f"{MOCK} --zero-stage 3 --bf16 --async-save --keep-last 2",
    "stage 1, fp32, text": f"{TEXT} --zero-stage 1 --fp32 --keep-last 1 --keep-every 1000000",
    "stage 2, fp16, async": f"{MOCK} --zero-stage 2 --fp16 --async-save --keep-last 3",
    "ZeRO++, bf16": f"{MOCK} --zero-stage 3 --bf16 --zero-quantized-weights --zero-quantized-gradients "
    "--zero-hpz-partition-size auto --keep-last 2",
}


def held(pid: int, report: Path) -> dict[str, int]:
    """What a process holds: private memory, memory in use by the last line of `report`, descriptors, threads.

    Memory is in KiB.
    """
    in_use = json.loads(report.read_text().splitlines()[-1])
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "in_use_kib": in_use["malloc_bytes"] // 1024,
        "kept_free_kib": in_use["malloc_free_bytes"] // 1024,
        "python_blocks": in_use["python_blocks"],
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def bytes_in(directory: Path) -> int:
    """The size of all files below a directory, which another process changes."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def piece(name: str, directory: Path, minutes: float) -> dict[str, Any]:
    """One run of a setting, observed to its end."""
    save, log = directory / "checkpoints", directory / f"log-{time.time_ns()}"
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "text.jsonl")
    argv = f"{MODEL} {SETTINGS[name].format(directory=directory)} --save {save} --load {save}".split()
    reports = [log / f"{rank}.in_use" for rank in range(RANKS)]
    job = Job(
        log,
        [*argv, "--exit-duration-in-mins", str(minutes)],
        RANKS,
        prepare=lambda rank: report_in_use(reports[rank], EVERY),
    )
    began, samples = time.monotonic(), []
    while not job.wait(EVERY):
        seconds = time.monotonic() - began
        try:
            ranks = [held(pid, report) for pid, report in zip(job.pids, reports, strict=True)]
        except (OSError, KeyError, ValueError):  # one has just ended, or is writing its line
            continue
        samples.append({"seconds": seconds, "ranks": ranks, "disk": bytes_in(save)})
        if seconds > 60 * minutes + 1800:
            job.kill()
    lines = job.log(0).splitlines()
    warm = [sample for sample in samples if sample["seconds"] > WARM_UP]
    quarter = max(len(warm) // 4, 1)
    saves = sum(line.startswith(" saved ") for line in lines)
    first, last = summary(warm[:quarter]), summary(warm[-quarter:])
    return {
        "setting": name,
        "commit": commit(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "statuses": sorted(job.statuses.values()),
        "saves": saves,
        "last_line": lines[-1] if lines else "",
        "warnings": [line for line in lines if "WARNING" in line][:5],
        "samples": len(samples),
        "first": first,
        "last": last,
        "verdict": verdict(first, last, saves),
    }


def verdict(first: dict[str, Any], last: dict[str, Any], saves: int) -> list[str]:
    """What the memory of each rank did between two summaries of a piece of so many saves."""
    found = []
    for rank in range(RANKS if first else 0):
        grown = {kind: last[kind][rank] - first[kind][rank] for kind in ("anonymous_kib", "in_use_kib")}
        blocks = last["python_blocks"][rank] - first["python_blocks"][rank]
        leaked = 1024 * grown["in_use_kib"] > LEAK * saves or blocks > LEAKED_BLOCKS * saves
        word = (
            "leak" if leaked else "fragmentation" if grown["anonymous_kib"] > grown["in_use_kib"] else "flat"
        )
        found.append(
            f"{word}: {grown['anonymous_kib']} KiB more held, {grown['in_use_kib']} KiB more in use, "
            f"{blocks} more blocks of Python's"
        )
    return found


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over some samples, by rank, and the most that was on the disk.

    Of what is in use the least: a sample in the middle of a step has its activations too.
    """
    if not samples:
        return {}
    ranks = range(len(samples[0]["ranks"]))
    found: dict[str, Any] = {}
    for kind in samples[0]["ranks"][0]:
        typical = min if kind in LEAST else statistics.median
        found[kind] = [round(typical(sample["ranks"][rank][kind] for sample in samples)) for rank in ranks]
    return found | {"disk_bytes_at_most": max(sample["disk"] for sample in samples)}


def write_text(path: Path) -> None:
    """Documents, the same each time."""
    if not path.exists():
        texts = (" ".join(str((7 * line + word) % 250) for word in range(200)) for line in range(400))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="of this call")
    parser.add_argument("--piece", type=float, default=10, help="minutes of a piece")
    parser.add_argument("--directory", type=Path, required=True, help="checkpoints and pieces.jsonl; kept")
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.directory.mkdir(parents=True, exist_ok=True)
    pieces = options.directory / "pieces.jsonl"
    names, deadline = list(SETTINGS), time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        done = len(pieces.read_text().splitlines()) if pieces.exists() else 0
        name = names[done % len(names)]
        found = piece(name, options.directory / str(done % len(names)), options.piece)
        with pieces.open("a") as file:
            file.write(json.dumps(found) + "\n")
        report(pieces, options.output)
    return 0


def report(pieces: Path, output: Path | None) -> None:
    """Writes the result from all pieces so far."""
    found = [json.loads(line) for line in pieces.read_text().splitlines()]
    hours = round(sum(one["minutes"] for one in found) / 60, 2)
    figures = {"hours": hours, "saves": sum(one["saves"] for one in found), "pieces": found}
    if output:
        write_result("soak", figures, output)


if __name__ == "__main__":
    sys.exit(main())
