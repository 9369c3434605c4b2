"""Injects faults into real runs and compares what they end with to the runs that nobody disturbed.

    python tests/faults/harness.py --seconds 120 --seed 1 [--output benchmarks/results]

A case is a run of 2 or 4 ranks over gloo at some stage, precision and way of saving, and a fault at a random
moment: a rank is killed, stopped or signalled, its disk is full or read-only. The run is started again, the
same command, until it is complete (at most `STARTS` times). It must end with the SHA-256 of the checkpoint of
the undisturbed run. Saves are also cut, by SIGKILL or an errno, at each of their calls that change a file
(cut.c is preloaded for that), and bits of every file of a checkpoint are flipped.
"""

import argparse
import ctypes
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from the root, not installed

import torch

import pretrain_gpt  # noqa: F401 - imported before ranks are forked
from benchmarks.common import write_result
from megatron_zpp.checkpoint.directory import candidates, committed
from megatron_zpp.checkpoint.read import CheckpointReader, load_checkpoint
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.verify import verify_tokens
from tests.checkpoint.saving import FIRST, TOKENIZER, save, small, train
from tests.children import Job, Output, fork

GOOD = ("equal", "found", "old and new whole")  # outcomes
ITERATIONS = 24
STARTS = 6
HEARTBEAT = 3  # seconds
PATIENCE = 20 * HEARTBEAT  # on a busy machine
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --lr 3e-3 --log-interval 8 --num-workers 0 "
    f"--train-iters {ITERATIONS} --eval-interval 9 --eval-iters 2 --save-interval 5 --device cpu "
    f"--heartbeat-timeout {HEARTBEAT} --global-batch-size 16"
).split()
ZEROPP = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size auto".split()
SETTINGS: list[tuple[int, list[str]]] = [
    (2, ["--zero-stage", "3", "--fp32"]),
    (2, ["--zero-stage", "1", "--bf16", "--async-save"]),
    (2, ["--zero-stage", "0", "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "4"]),
    (4, ["--zero-stage", "3", "--bf16", "--async-save", "--keep-last", "2"]),
    (4, ["--zero-stage", "2", "--fp32", "--keep-last", "1", "--keep-every", "10"]),
    (2, ["--zero-stage", "3", "--bf16", *ZEROPP]),
]


@dataclass
class Tally:
    """What became of the faults."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, fault: str, outcome: str, detail: str = "") -> None:
        """Takes note of a fault and of what became of it, with what a reader of a failure needs to know."""
        self.faults[fault] += 1
        self.outcomes[f"{fault}: {outcome}"] += 1
        if outcome not in GOOD:
            self.failures.append(f"{fault}: {outcome}: {detail}")
            print("FAILURE", self.failures[-1], flush=True)


class Disk:
    """A file system of a few MiB that can be filled and made read-only; needs root."""

    def __init__(self, path: Path, size: str = "24m") -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def fill(self) -> None:
        """Leaves no room."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Gives the room back."""
        (self.path / "filler").unlink(missing_ok=True)

    def read_only(self, on: bool) -> None:
        """Refuses writes, or takes them again."""
        self._mount("-o", "remount,ro" if on else "remount,rw")

    def remove(self) -> None:
        """Unmounts."""
        subprocess.run(["umount", "-l", str(self.path)], check=False)

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.path)], check=True, stderr=subprocess.PIPE)


def digest(directory: Path) -> str:
    """SHA-256 of the states of the last iteration, as all ranks saved them."""
    path = directory / f"iter_{ITERATIONS:07d}"
    sha = hashlib.sha256()
    for file in sorted(path.glob("rank_*.safetensors")):
        sha.update(file.read_bytes())
    state = json.loads((path / "state.json").read_text())
    for key in ("progress", "optimizer_steps", "loss_scale"):
        sha.update(json.dumps(state[key], sort_keys=True).encode())
    return sha.hexdigest()


def losses(metrics: Path) -> dict[int, float]:
    """The loss of each iteration, as it was logged last."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {record["iteration"]: record["lm_loss"] for record in records if "lm_loss" in record}


class Cases:
    """Disturbed runs beside undisturbed ones, in a temporary directory."""

    def __init__(self, directory: Path, draw: random.Random, tally: Tally) -> None:
        self._directory, self._draw, self._tally = directory, draw, tally
        self._whole: dict[int, tuple[str, float]] = {}
        self._losses: dict[int, float] | None = None  # of each iteration, undisturbed
        self._count = 0

    def one(self) -> None:
        """One case with a fault of a random kind; more of those that are cheap."""
        index = self._draw.randrange(len(SETTINGS))
        expected, seconds = self._undisturbed(index)
        kinds = [self._kill] * 5 + [self._signal] * 3 + [self._other_world] * 2 + [self._stop]
        if os.geteuid() == 0:
            kinds += [self._full_disk, self._read_only_disk]
        self._draw.choice(kinds)(index, expected, seconds)

    def _undisturbed(self, index: int) -> tuple[str, float]:
        if index not in self._whole:
            save, began = self._directory / f"whole-{index}", time.monotonic()
            job = self._start(index, save)
            assert job.wait(120), "an undisturbed run does not end"
            assert set(job.statuses.values()) == {0}, job.log(0)
            self._whole[index] = (digest(save), time.monotonic() - began)
        return self._whole[index]

    def _start(self, index: int, save: Path) -> Job:
        world, flags = SETTINGS[index]
        return self._start_with(world, flags, save)

    def _start_with(self, world: int, flags: list[str], save: Path) -> Job:
        self._count += 1
        logs = self._directory / "logs" / str(self._count)
        return Job(logs, [*MODEL, *flags, "--save", str(save), "--load", str(save)], world)

    def _to_the_end(self, fault: str, index: int, save: Path, expected: str) -> None:
        """Starts the run until it is complete and compares."""
        for _ in range(STARTS):
            job = self._start(index, save)
            if not job.wait(60):
                job.kill()
                return self._tally.add(fault, "hang", f"setting {index}: {job.log(0)[-500:]}")
            if set(job.statuses.values()) == {0}:
                return self._tally.add(
                    fault,
                    "equal" if digest(save) == expected else "different",
                    f"setting {index}: {job.log(0)}",
                )
        return self._tally.add(fault, "never complete", f"setting {index}: {job.log(0)[-2000:]}")

    def _moment(self, seconds: float) -> None:
        time.sleep(self._draw.random() * 1.05 * seconds)

    def _joined(self, job: Job) -> bool:
        """Whether the ranks watch each other; before that a launcher ends those that are left."""
        return "torch " in job.log(0)

    def _new(self) -> Path:
        self._count += 1
        return self._directory / f"run-{self._count}"

    def _kill(self, index: int, expected: str, seconds: float) -> None:
        save = self._new()
        for _ in range(self._draw.choice((1, 1, 2))):
            job = self._start(index, save)
            rank = self._draw.randrange(len(job.pids))
            self._moment(seconds)
            joined = self._joined(job)
            job.send(rank, signal.SIGKILL)
            if not job.wait(PATIENCE if joined else 0) and joined:
                job.kill()
                return self._tally.add("SIGKILL", "survivors hang", job.log(1 - min(rank, 1))[-500:])
            job.kill()
        self._to_the_end("SIGKILL", index, save, expected)
        return shutil.rmtree(save)

    def _stop(self, index: int, expected: str, seconds: float) -> None:
        save, job = self._new(), None
        job = self._start(index, save)
        rank = self._draw.randrange(len(job.pids))
        self._moment(seconds)
        joined = self._joined(job)
        job.send(rank, signal.SIGSTOP)
        deadline = time.monotonic() + (PATIENCE if joined else 0)
        while not job.poll() and len(job.statuses) < len(job.pids) - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        late = len(job.statuses) < len(job.pids) - 1
        job.kill()
        if late and joined:
            return self._tally.add("SIGSTOP", "survivors hang", job.log(1 - min(rank, 1))[-500:])
        self._to_the_end("SIGSTOP", index, save, expected)
        return shutil.rmtree(save)

    def _other_world(self, index: int, expected: str, seconds: float) -> None:
        """Killed and gone on with by other ranks at other stages: each step has the loss of its samples."""
        save = self._new()
        flags = ["--fp32", "--log-interval", "1", "--metrics-file"]
        if self._losses is None:
            job = self._start_with(1, [*flags, str(self._directory / "whole.jsonl")], self._new())
            assert job.wait(120), "an undisturbed run does not end"
            self._losses = losses(self._directory / "whole.jsonl")
        path = self._directory / f"{save.name}.jsonl"
        for start in range(STARTS):
            world, stage = self._draw.choice((1, 2, 4)), self._draw.randrange(4)
            job = self._start_with(world, ["--zero-stage", str(stage), *flags, str(path)], save)
            joined = True
            if start < 2:
                self._moment(seconds)
                joined = self._joined(job)
                job.send(self._draw.randrange(world), signal.SIGKILL)
            if not job.wait(PATIENCE if joined else 0):
                job.kill()
            if set(job.statuses.values()) == {0}:
                found = losses(path)
                same = found.keys() == self._losses.keys() and all(
                    abs(loss / self._losses[iteration] - 1) < 1e-4 for iteration, loss in found.items()
                )
                return self._tally.add("SIGKILL, other ranks", "equal" if same else "different", str(found))
        return self._tally.add("SIGKILL, other ranks", "never complete", job.log(0)[-2000:])

    def _signal(self, index: int, expected: str, seconds: float) -> None:
        number = self._draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
        save = self._new()
        job = self._start(index, save)
        self._moment(seconds)
        joined = self._joined(job)
        job.send(self._draw.randrange(len(job.pids)), number)
        if not job.wait(PATIENCE if joined else 0) and joined:
            job.kill()
            return self._tally.add(number.name, "hang", job.log(0)[-500:])
        job.kill()
        self._to_the_end(number.name, index, save, expected)
        return shutil.rmtree(save, ignore_errors=True)

    def _full_disk(self, index: int, expected: str, seconds: float) -> None:
        self._with_disk("full disk", Disk.fill, Disk.empty, index, expected, seconds)

    def _read_only_disk(self, index: int, expected: str, seconds: float) -> None:
        def protect(disk: Disk) -> None:
            for _ in range(200):  # busy while a save has a file open
                try:
                    return disk.read_only(True)
                except subprocess.CalledProcessError:
                    time.sleep(0.01)
            return None

        self._with_disk(
            "read-only directory", protect, lambda disk: disk.read_only(False), index, expected, seconds
        )

    def _with_disk(
        self,
        fault: str,
        break_it: Callable[[Disk], None],
        mend_it: Callable[[Disk], None],
        index: int,
        expected: str,
        seconds: float,
    ) -> None:
        """The training goes on beside a disk that takes nothing, says so, and ends with an error."""
        disk = Disk(self._new())
        save = disk.path / "checkpoints"
        try:
            job = self._start(index, save)
            self._moment(seconds)
            break_it(disk)
            if not job.wait(60):
                job.kill()
                return self._tally.add(fault, "hang", job.log(0)[-500:])
            mend_it(disk)
            told = "could not be saved" in job.log(0) or "--save" in job.log(0)
            if set(job.statuses.values()) != {0} and not told:
                return self._tally.add(fault, "not told", job.log(0)[-800:])
            self._to_the_end(fault, index, save, expected)
        finally:
            disk.remove()
        return None


def cut_saves(directory: Path, tally: Tally, seconds: float) -> None:
    """Cuts a save at each of its calls that change a file: by a kill, and by the errors that disks give."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.calls.restype = ctypes.c_long
    engine = small()
    train(engine, 1, seed=2)
    states = directory / "none", directory / "two"  # before the save that is cut
    states[0].mkdir()
    save(states[1], engine, Progress(4, 40))
    save(states[1], engine, FIRST)
    train(engine, 1, seed=3)

    def attempt(target: Path, call: int, error: int) -> None:
        library.arm(ctypes.c_long(call), error)
        try:
            save(target, engine, FIRST, read_back=True)
        except SaveFailed:
            sys.exit(7)
        sys.exit(0 if library.calls() < call else 8)

    log, deadline = directory / "cut.log", time.monotonic() + seconds
    for before, error in itertools.product(states, (0, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)):
        fault = "save killed at a call" if error == 0 else f"save meets {errno.errorcode[error]} at a call"
        there = len(committed(before))
        for call in range(1, 10_000):
            target = directory / "cut"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(before, target)
            pid = fork(partial(attempt, target, call, error), Output(log, log))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            found = read_all(target)
            whole = len(found) in (there, max(there, 1)) and set(found.values()) <= {1, 2}
            told = status in ((0, -signal.SIGKILL) if error == 0 else (0, 7, 8))
            detail = "" if whole and told else f"call {call}, status {status}, found {found}"
            tally.add(fault, "damaged" if detail else "old and new whole", detail)
            if status == 0:
                break
            if time.monotonic() > deadline:
                return


def read_all(directory: Path) -> dict[str, int]:
    """The steps that each committed checkpoint was saved after; raises where one is not whole."""
    steps = {}
    for path in committed(directory).values():
        engine = small(seed=9)
        load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
        steps[path.name] = engine.optimizer_steps
    return steps


def read_checkpoint(directory: Path) -> None:
    """Reads and checks all of the newest, as the ranks of a run do together."""
    with CheckpointReader(candidates(str(directory))[0]) as reader:
        reader.check_rest(0, 1)


def read_data(prefix: str) -> None:
    """Opens a data set and checks its tokens, as --verify-data does."""
    verify_tokens([IndexedDataset(prefix)], 0, 1)


def flip_bits(directory: Path, tally: Tally, draw: random.Random, flips: int) -> None:
    """Flips bits in every file of a checkpoint and of a data set, and cuts them: each must be found."""
    engine = small()
    train(engine, 1, seed=2)
    path, prefix = save(directory / "flips", engine), str(directory / "data")
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for length in range(200):
            writer.add_document(list(range(length)))
    readers = dict.fromkeys(path.iterdir(), partial(read_checkpoint, path.parent))
    readers |= {Path(f"{prefix}.{kind}"): partial(read_data, prefix) for kind in ("idx", "bin")}
    files = list(readers)
    for number in range(flips):
        file = files[number % len(files)]
        content = file.read_bytes()
        changed = bytearray(content)
        if draw.random() < 0.9:
            bit = draw.randrange(8 * len(content))
            changed[bit // 8] ^= 1 << bit % 8
            fault = "bit flip"
        else:
            changed = changed[: draw.randrange(len(content))]
            fault = "truncation"
        file.write_bytes(changed)
        try:
            readers[file]()
            tally.add(fault, "not found", f"{file.name}")
        except ValueError as error:
            line = str(error)
            tally.add(fault, "found" if "\n" not in line and len(line) < 600 else "unclear", line)
        file.write_bytes(content)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="of disturbed runs")
    parser.add_argument("--cut-seconds", type=float, default=60, help="of saves that are cut")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, draw = Tally(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "LD_PRELOAD" not in os.environ:  # again, with the calls that can be cut
            library = directory / "cut.so"
            source = Path(__file__).with_name("cut.c")
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
            alone = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            argv = [sys.executable, __file__, *sys.argv[1:]]
            return subprocess.run(argv, env=os.environ | alone, check=False).returncode
        began = time.monotonic()
        flip_bits(directory, tally, draw, options.flips)
        cut_saves(directory, tally, options.cut_seconds)
        cases, deadline = Cases(directory, draw, tally), time.monotonic() + options.seconds
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
