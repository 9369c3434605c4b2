"""Rates of writing, reading back and loading a rank's file with its digests, beside the disk's own rates.

    python benchmarks/checkpoint_rates.py --directory DIRECTORY [--before ROOT] [--repeats 5]

`--before`: the root of an older checkout, whose code takes turns with this one's in each repeat, a process
each. Every process measures the disk's own rates beside those of the code, because they vary as much:

    write        write_shard_file, durable          disk: the same memory in pieces of a chunk, then fsync
    read_back    verify_file after a write          disk: the file read in pieces of a chunk, from the disk
    load         ShardFile.read_into of all tensors, a tensor at a time, from the disk
    cached       as read_back, but from the page cache: how fast digests are computed

All write the same tensors, because a piece that stays in the processor's cache would flatter the disk. Disk
and code take turns (disk, code, code, disk) after a first round that does not count. Each turn begins without
its predecessor's file, or with no file in the page cache; otherwise the second one would pay for memory that
a hypervisor has not given yet.

CPU seconds are those of the process, all threads together.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("CHECKPOINT_RATES_ROOT", str(Path(__file__).resolve().parents[1])))

import torch

from megatron_zpp.checkpoint.shard_file import ShardFile, write_shard_file
from megatron_zpp.storage import checksums as code
from megatron_zpp.storage.checksums import CHUNK_BYTES, verify_file

TENSORS = 8  # of a file


def measured(action: Callable[[], Any], size: int) -> dict[str, float]:
    """GB/s and CPU seconds per GB of an action on `size` bytes."""
    cpu, started = time.process_time(), time.perf_counter()
    action()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"gb_per_second": round(size / seconds / 1e9, 3), "cpu_seconds_per_gb": round(cpu / size * 1e9, 3)}


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plain(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The bytes of the tensors, on the disk."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            left = tensor.view(torch.uint8).numpy().data
            while left.nbytes:
                left = left[file.write(left[:CHUNK_BYTES]) :]
        os.fsync(file.fileno())


def in_turns(
    disk: Callable[[], Any], code: Callable[[], Any], before: Callable[[], None], size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Rates of the disk and of the code, each from two turns of two; the first turn of each is dropped."""
    runs: dict[Callable[[], Any], list[dict[str, float]]] = {disk: [], code: []}
    for action in (disk, code, disk, code, code, disk):
        before()
        runs[action].append(measured(action, size))
    disk_rate, code_rate = (mean(runs[action][1:]) for action in (disk, code))
    return disk_rate, code_rate


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of all runs together."""
    seconds = statistics.mean(1 / run["gb_per_second"] for run in runs)
    cpu = statistics.mean(run["cpu_seconds_per_gb"] for run in runs)
    return {"gb_per_second": round(1 / seconds, 3), "cpu_seconds_per_gb": round(cpu, 3)}


def read_plain(path: Path) -> None:
    """All of a file, into the same memory."""
    piece = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def measure(directory: Path, size: int) -> dict[str, dict[str, float]]:
    """All rates of the code that this process has imported."""
    tensors = {f"weights/unit_{index}": torch.rand(size // TENSORS // 4 + 1) for index in range(TENSORS)}
    threads = getattr(code, "thread_count", None)
    path, plain, figures = directory / "shards", directory / "plain", {}

    def remove() -> None:
        path.unlink(missing_ok=True)

    def forget_all() -> None:
        forget(plain)
        forget(path)

    figures["disk_write"], figures["write"] = in_turns(
        lambda: write_plain(path, tensors), lambda: write_shard_file(path, tensors), remove, size
    )
    remove()
    write_plain(plain, tensors)
    written = write_shard_file(path, tensors)

    def read_back() -> None:
        if threads is None:  # before there were several threads
            verify_file(path, written)
            return
        with ThreadPoolExecutor(threads()) as pool:
            verify_file(path, written, pool.map)

    def load() -> None:
        with ThreadPoolExecutor(threads() if threads else 4) as pool:
            file = ShardFile(path, written)
            for name, tensor in tensors.items():
                file.read_into(name, 0, torch.empty(len(tensor)), pool.map)
            file.file.close()

    def disk_read() -> None:
        read_plain(plain)

    figures["disk_read"], figures["read_back"] = in_turns(disk_read, read_back, forget_all, size)
    read_back()
    figures["cached"] = measured(read_back, size)
    figures["disk_read_beside_load"], figures["load"] = in_turns(disk_read, load, forget_all, size)
    plain.unlink()
    path.unlink()
    return figures


def run_in(root: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The rates of the code in `root`, in a process of its own."""
    command = [sys.executable, __file__, "--directory", str(options.directory), "--bytes", str(options.bytes)]
    environment = {**os.environ, "CHECKPOINT_RATES_ROOT": str(root)}
    child = subprocess.run(
        [*command, "--once"], env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=root
    )
    return json.loads(child.stdout)


def summary(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median, least and most of every figure, and of the rates relative to the disk's in the same process."""
    rows: dict[str, Any] = {}
    for name in runs[0]:
        for figure in runs[0][name]:
            values = sorted(run[name][figure] for run in runs)
            rows.setdefault(name, {})[figure] = [statistics.median(values), values[0], values[-1]]
    for name, disk in (
        ("write", "disk_write"),
        ("read_back", "disk_read"),
        ("load", "disk_read_beside_load"),
    ):
        values = sorted(run[name]["gb_per_second"] / run[disk]["gb_per_second"] for run in runs)
        rows[name]["of_the_disk"] = [
            round(value, 3) for value in (statistics.median(values), values[0], values[-1])
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="the root of an older checkout")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="measure once and print JSON")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.once:
        print(json.dumps(measure(options.directory, options.bytes)))
        return
    from benchmarks.common import RESULTS, write_result

    roots = {"now": Path(__file__).resolve().parents[1]} | (
        {"before": options.before} if options.before else {}
    )
    loads: list[float] = []
    runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in roots}
    for _ in range(options.repeats):
        for name, root in roots.items():
            runs[name].append(run_in(root, options))
            loads.append(os.getloadavg()[0])
    figures = {
        "load_average": [min(loads), max(loads)],
        "bytes": options.bytes,
        "repeats": options.repeats,
        "each": "median, least, most",
        **{name: summary(found) for name, found in runs.items()},
    }
    write_result("checkpoint_rates", figures, options.output or RESULTS)
    shutil.rmtree(options.directory)


if __name__ == "__main__":
    main()
