"""What a memory snapshot costs, and how long a killed run takes until its next step.

    python benchmarks/memory_snapshots.py [--part copies steps kills] [--repeats 5] [--pairs 15] [--kills 3]
                                         [--gpus]

copies   CPU seconds per GB of a rank's states, wherever they are spent: to write a copy with its checksums to
         tmpfs, to send it over loopback, and to receive it into tmpfs. On a busy machine they are what stays
         the same.
steps    One run takes a snapshot every 40 steps. The time of the 20 steps after a snapshot is compared with
         that of the 20 steps after them, so that both see the same load of the machine. A run without
         snapshots is the control.
kills    SIGKILL of a rank, or of all of a node, whose memory is emptied. The other node notices by itself;
         when one torchrun has ended, the other is ended and both are started again, as a job script does. The
         time is that from the kill to the first step that was not taken before: noticing, starting, joining,
         loading, and the steps that are repeated. Runs that save checkpoints are killed in the same way.

Two nodes of one rank each run on this machine, by a torchrun per node. Each has a directory of its own in
/dev/shm, so that a node can be lost with its memory. Each part writes a result of its own. A small model is
trained on CPUs; with --gpus one of 345M parameters, a GPU for each rank, NCCL over sockets between them.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from benchmarks.contest.grid import node_environment, visible_gpus
from benchmarks.intervals import mean_and_interval
from megatron_zpp.memory_snapshots.copies import MemoryCopies, SnapshotName, file_names
from megatron_zpp.memory_snapshots.peer_files import FileServer, Peer, put_file
from tests.support import free_port

_COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 100000 --log-interval 1 "
    "--eval-iters 0 --zero-stage 3 --num-workers 0 "
)
MODEL = (
    _COMMON + "--vocab-size 1023 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 2 --device cpu"
).split()
GPU_MODEL = (
    _COMMON + "--vocab-size 50257 --model-preset 345m --seq-length 1024 --micro-batch-size 8 --bf16 "
    "--zero-hpz-partition-size auto --zero-quantized-weights --zero-quantized-weights-format delta4 "
    "--zero-quantized-gradients --zero-quantized-gradients-format rotated4"
).split()
EVERY = 5  # steps between two snapshots, or saves
PARTS = ("copies", "steps", "kills")
WINDOW = 20  # steps whose time is compared
VARIANTS = {
    "memory snapshots": ["--buddy-snapshots", str(EVERY)],
    "asynchronous saves": ["--save-interval", str(EVERY), "--async-save", "--keep-last", "2"],
}
_STEP = re.compile(r"iteration +(\d+)/")


class Job:
    """A run on two nodes; `memory` has a directory for each, `save` is what they share."""

    def __init__(self, flags: list[str], save: Path, memory: Path, gpus: Sequence[str]) -> None:
        """`gpus` has one for each node, or none."""
        self._gpus = gpus
        model = GPU_MODEL if gpus else MODEL
        self._argv = [*model, *flags, "--save", str(save), "--load", str(save)]
        self._memory, self._snapshots = memory, "--buddy-snapshots" in flags
        self.times: dict[int, float] = {}  # when this benchmark first read of a step
        self.log: list[str] = []
        self.nodes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start a torchrun for each node."""
        port = str(free_port())
        self.log, self.nodes = [], []
        for node in range(2):
            argv = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
            argv += ["--master-addr", "127.0.0.1", "--master-port", port, "pretrain_gpt.py", *self._argv]
            if self._snapshots:
                self.of(node).mkdir(exist_ok=True)
                argv += ["--buddy-directory", str(self.of(node))]
            self.nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *argv],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if node else subprocess.STDOUT,
                    text=True,
                    env=os.environ | node_environment(node, self._gpus[node : node + 1], {}, 1),
                    start_new_session=True,
                )
            )
            threading.Thread(target=self._read, args=(self.nodes[-1], node == 0), daemon=True).start()

    def of(self, node: int) -> Path:
        """The memory of a node."""
        return self._memory / str(node)

    def wait_for_step(self, step: int) -> float:
        """When the step was logged. Ends the benchmark if the run ends earlier."""
        while step not in self.times:
            if self.nodes[0].poll() is not None and step not in self.times:
                raise SystemExit("the run ended early:\n" + "\n".join(self.log[-20:]))
            time.sleep(0.005)
        return self.times[step]

    def kill(self, what: str) -> float:
        """Kill the rank of node 1, or all of node 1 and its memory; returns when."""
        began = time.perf_counter()
        if what == "a node":
            kill(self.nodes[1])
            shutil.rmtree(self.of(1), ignore_errors=True)
        else:
            children = Path(f"/proc/{self.nodes[1].pid}/task/{self.nodes[1].pid}/children")
            for process in children.read_text().split():
                os.kill(int(process), signal.SIGKILL)
        return began

    def start_again(self) -> float:
        """Wait until a surviving torchrun has ended, end the other, and start both; returns when."""
        survivors = [node for node in self.nodes if node.poll() != -signal.SIGKILL]
        while all(node.poll() is None for node in survivors):
            time.sleep(0.005)
        self.end()
        self.start()
        return time.perf_counter()

    def end(self) -> None:
        """End both nodes."""
        for node in self.nodes:
            kill(node)

    def _read(self, node: subprocess.Popen[str], keep: bool) -> None:
        assert node.stdout is not None
        for line in node.stdout:
            if keep:
                self.log.append(line.rstrip())
                if match := _STEP.search(line):
                    self.times.setdefault(int(match[1]), time.perf_counter())


def kill(node: subprocess.Popen[str]) -> None:
    """End all processes of a node: ranks are in the session of their torchrun."""
    ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    try:
        children = [int(process) for process in ranks.read_text().split()]
    except OSError:
        children = []
    for process in (node.pid, *children):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    node.wait()


def copies(repeats: int, megabytes: int = 256) -> dict[str, Any]:
    """CPU seconds per GB of one process that is the sender and the receiver."""
    parts: dict[str, list[float]] = {"write": [], "send_and_receive": []}
    tensors = {f"weights/unit_{unit}": torch.randn(megabytes << 14) for unit in range(16)}
    state: dict[str, Any] = {"ranks": 2, "nodes": 2, "tensor": 1, "units": []}
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    for repeat in range(repeats):
        with directories() as (_, memory):
            snapshot, sender = SnapshotName(repeat, "0" * 8), MemoryCopies(memory, 0)
            server = FileServer("secret", memory / "holder_1", lambda name: None)
            began = time.process_time()
            sender.write(snapshot, 0, tensors, state)
            written = time.process_time()
            for name in file_names(snapshot, 0):
                put_file(Peer("127.0.0.1", server.port, "secret"), sender.path / name, name)
            parts["write"].append((written - began) / gigabytes)
            parts["send_and_receive"].append((time.process_time() - written) / gigabytes)
            server.close()
    return {"megabytes": megabytes, "cpu_seconds_per_gb": {name: interval(parts[name]) for name in parts}}


def windows(flags: list[str], pairs: int, gpus: Sequence[str]) -> tuple[list[float], list[float]]:
    """Milliseconds of the steps after a snapshot and of the steps after these, in pairs."""
    with directories() as (save, memory):
        job = Job(flags, save, memory, gpus)
        job.start()
        try:
            job.wait_for_step(2 * WINDOW * (pairs + 1))
            ends = [1e3 * job.times[WINDOW * index] for index in range(2, 2 * (pairs + 1) + 1)]
        finally:
            job.end()
    times = [stop - start for start, stop in itertools.pairwise(ends)]
    return times[0::2], times[1::2]


def recovery(flags: list[str], what: str, gpus: Sequence[str]) -> dict[str, float]:
    """Seconds from a kill to a new start, to its first step, and to the first step not taken before."""
    with directories() as (save, memory):
        job = Job(flags, save, memory, gpus)
        job.start()
        try:
            job.wait_for_step(12 * EVERY + 3)
            began = job.kill(what)
            started = job.start_again()
            done = max(job.times)
            new = job.wait_for_step(done + 1)
            resumed = next(line for line in job.log if "resuming at iteration" in line)
            found = re.search(r"resuming at iteration (\d+)", resumed)
            assert found is not None
            in_memory = "in memory" in resumed
            assert in_memory == ("--buddy-snapshots" in flags), resumed
            return {
                "noticed_and_restarted": round(started - began, 2),
                "next_new_step": round(new - began, 2),
                "steps_repeated": done - int(found[1]),
            }
        finally:
            job.end()


@contextmanager
def directories() -> Iterator[tuple[Path, Path]]:
    """A directory for checkpoints and one in memory, removed at the end."""
    with tempfile.TemporaryDirectory() as save, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(save) / "checkpoints", Path(memory)


def steps(pairs: int, gpus: Sequence[str]) -> dict[str, Any]:
    """Milliseconds per step, and per snapshot."""
    figures: dict[str, Any] = {"ranks": "2 nodes × 1", "model": " ".join(GPU_MODEL if gpus else MODEL)}
    for name, flags in (("with", ["--buddy-snapshots", str(2 * WINDOW)]), ("control", [])):
        after, later = windows(flags, pairs, gpus)
        differences = [one - other for one, other in zip(after, later, strict=True)]
        figures[name] = {
            "milliseconds_per_step": interval([time / WINDOW for time in later]),
            "milliseconds_per_snapshot": interval(differences),
        }
    return figures


def kills(count: int, gpus: Sequence[str]) -> dict[str, Any]:
    """Seconds from a kill to what follows it."""
    figures: dict[str, Any] = {"ranks": "2 nodes × 1", "model": " ".join(GPU_MODEL if gpus else MODEL)}
    cases = (("a rank", "memory snapshots"), ("a node", "memory snapshots"), ("a rank", "asynchronous saves"))
    runs: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(count):  # in turns, so that all cases see the same load of the machine
        for what, name in cases:
            runs[what, name].append(recovery(VARIANTS[name], what, gpus))
            print(f"{what}, {name}: {runs[what, name][-1]}", flush=True)
    for (what, name), found in runs.items():
        figures[f"{what} killed, {name}"] = {
            "seconds_to_next_new_step": interval([run["next_new_step"] for run in found]),
            "seconds_to_restart": interval([run["noticed_and_restarted"] for run in found]),
            "most_steps_repeated": max(run["steps_repeated"] for run in found),
            "all": found,
        }
    return figures


def interval(values: list[float]) -> dict[str, float]:
    """Median, and mean with its 95% interval by Student's t."""
    average, half_width = mean_and_interval(values)
    figures = {"median": round(median(values), 4), "mean": round(average, 4)}
    return figures if half_width is None else figures | {"plus_minus_95": round(half_width, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--gpus", action="store_true", help="train a larger model on two GPUs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpus = visible_gpus()[:2] if options.gpus else []
    if options.gpus and len(gpus) < 2:
        parser.error(f"--gpus: needs two GPUs, and there are {len(gpus)}")
    for part in options.part:
        if part == "copies":
            figures = copies(options.repeats)
        elif part == "steps":
            figures = steps(options.pairs, gpus)
        else:
            figures = kills(options.kills, gpus)
        load = [round(value, 1) for value in os.getloadavg()]
        name = f"memory_snapshots_{part}" + "_cuda" * bool(gpus)
        write_result(name, figures | {"load_average": load}, options.output)


if __name__ == "__main__":
    main()
