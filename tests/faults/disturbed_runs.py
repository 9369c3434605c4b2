"""Runs of which a rank is killed, stopped or signalled, or the disk fails, and what they end with."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.children import Job
from tests.faults.outcomes import digest, losses
from tests.faults.tally import Tally

ITERATIONS = 24
STARTS = 6
HEARTBEAT = 5  # seconds, where a rank is stopped; elsewhere a rank must not seem lost on a busy machine
PATIENCE = 240  # seconds, on a busy machine
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --lr 3e-3 --log-interval 8 --num-workers 0 "
    f"--train-iters {ITERATIONS} --eval-interval 9 --eval-iters 2 --save-interval 5 --device cpu "
    "--heartbeat-timeout 60 --global-batch-size 16"
).split()
UNWATCHED = ["--heartbeat-timeout", "0"]  # nobody is lost there, however busy the machine is
ZEROPP = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size auto".split()
SETTINGS: list[tuple[int, list[str]]] = [
    (2, ["--zero-stage", "3", "--fp32"]),
    (2, ["--zero-stage", "1", "--bf16", "--async-save"]),
    (2, ["--zero-stage", "0", "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "4"]),
    (4, ["--zero-stage", "3", "--bf16", "--async-save", "--keep-last", "2"]),
    (4, ["--zero-stage", "2", "--fp32", "--keep-last", "1", "--keep-every", "10"]),
    (2, ["--zero-stage", "3", "--bf16", *ZEROPP]),
]


Kind = Callable[[int, str, float], None]  # a fault, to a setting; what undisturbed it ends with, and when


class Disk:
    """A file system of a few MiB that can be filled and made read-only; needs root."""

    def __init__(self, path: Path, size: str = "24m") -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def fill(self) -> None:
        """Fill the file system."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Free the space."""
        (self.path / "filler").unlink(missing_ok=True)

    def read_only(self, on: bool) -> None:
        """Make the file system read-only, or writable again."""
        self._mount("-o", "remount,ro" if on else "remount,rw")

    def remove(self) -> None:
        """Unmounts."""
        subprocess.run(["umount", "-l", str(self.path)], check=False)

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.path)], check=True, stderr=subprocess.PIPE)


class Cases:
    """Compares disturbed runs with undisturbed ones, in a temporary directory."""

    def __init__(self, directory: Path, draw: random.Random, tally: Tally) -> None:
        self._directory, self._draw, self._tally = directory, draw, tally
        self._whole: dict[int, tuple[str, float]] = {}
        self._losses: dict[int, float] | None = None  # of each iteration, undisturbed
        self._count = 0

    def one(self) -> None:
        """One case with a fault of a random kind; more of those that are cheap."""
        often = [self._kill] * 4 + [self._signal] * 2 + [self._other_world]
        self._case(self._draw.choice(self._kinds() + often))

    def one_of_each(self) -> None:
        """One case of each kind of fault."""
        for kind in self._kinds():
            self._case(kind)

    def _kinds(self) -> list[Kind]:
        disks = [self._full_disk, self._read_only_disk] if os.geteuid() == 0 else []
        return [self._kill, self._signal, self._other_world, self._stop, *disks]

    def _case(self, kind: Kind) -> None:
        index = self._draw.randrange(len(SETTINGS))
        kind(index, *self._undisturbed(index))

    def _undisturbed(self, index: int) -> tuple[str, float]:
        if index not in self._whole:
            save, began = self._directory / f"whole-{index}", time.monotonic()
            world, flags = SETTINGS[index]
            job = self._start_with(world, [*flags, *UNWATCHED], save)
            assert job.wait(PATIENCE), "an undisturbed run does not end"
            assert set(job.statuses.values()) == {0}, job.log(0)
            self._whole[index] = (digest(save), time.monotonic() - began)
        return self._whole[index]

    def _start(self, index: int, save: Path, *more: str) -> Job:
        world, flags = SETTINGS[index]
        return self._start_with(world, [*flags, *more], save)

    def _start_with(self, world: int, flags: list[str], save: Path) -> Job:
        self._count += 1
        logs = self._directory / "logs" / str(self._count)
        return Job(logs, [*MODEL, *flags, "--save", str(save), "--load", str(save)], world)

    def _to_the_end(self, fault: str, index: int, save: Path, expected: str) -> None:
        """Start the run until it is complete, and compare."""
        for _ in range(STARTS):
            job = self._start(index, save)
            if not job.wait(PATIENCE):
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
        """Whether the ranks watch each other; before that, the launcher ends the remaining ranks."""
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
        save = self._new()
        job = self._start(index, save, "--heartbeat-timeout", str(HEARTBEAT))
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
        """Killed, then resumed with other ranks and stages: each step has the loss of its samples."""
        save = self._new()
        flags = ["--fp32", "--log-interval", "1", "--metrics-file"]
        if self._losses is None:
            whole = [*UNWATCHED, *flags, str(self._directory / "whole.jsonl")]
            job = self._start_with(1, whole, self._new())
            assert job.wait(PATIENCE), "an undisturbed run does not end"
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
        """The training continues while the disk refuses writes, reports it, and ends with an error."""
        disk = Disk(self._new())
        save = disk.path / "checkpoints"
        try:
            job = self._start(index, save)
            self._moment(seconds)
            break_it(disk)
            if not job.wait(PATIENCE):
                job.kill()
                return self._tally.add(fault, "hang", job.log(0)[-500:])
            mend_it(disk)
            said = "".join(map(job.log, job.statuses))  # what all ranks find out, any one of them says
            told = "could not be saved" in said or "--save" in said
            told = told or "has been silent for" in said  # the machine is so busy that a rank seems lost
            if set(job.statuses.values()) != {0} and not told:
                return self._tally.add(fault, "not told", said[-800:])
            self._to_the_end(fault, index, save, expected)
        finally:
            disk.remove()
        return None
