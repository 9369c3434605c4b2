"""Starts the programs of this repository the way a user would."""

import faulthandler
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import multiprocessing.process
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.commands.scripts import COMMANDS
from megatron_zpp.config.command_line import run_tool
from tests.forkserver import CONTEXT

ROOT = Path(__file__).resolve().parents[1]


# torch 2.8 computes queries in groups by plain attention on CPUs: other sums, and scores that are kept
GROUPED_FLASH = not importlib.metadata.version("torch").startswith("2.8.")


def environment(**extra: str) -> dict[str, str]:
    """This environment, with the repository importable, few threads and no launcher's variables."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CI")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("SLURM_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **extra}


def run(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `executed`, of python with `argv`."""
    return executed(sys.executable, *argv, **options)


def executed(
    *argv: str | Path, cwd: Path = ROOT, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program with `argv` to its end; `extra` joins the environment."""
    more: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run([*map(str, argv)], cwd=cwd, env=environment(**extra), **more)


def pretrain(
    *argv: str, processes: int = 1, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs ranks of pretrain_gpt.py to their end; what they print, joined."""
    return program("pretrain_gpt", *argv, processes=processes, timeout=timeout, **extra)


def trained(*argv: str, **options: Any) -> str:
    """Runs `pretrain`, which must succeed; what its ranks print on stdout."""
    done = pretrain(*argv, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def logged(metrics: str | Path, name: str = "lm_loss") -> list[Any]:
    """One number of each record of a run's metrics file that has it."""
    return [record[name] for record in records_of(metrics) if name in record]


def records_of(metrics: str | Path) -> list[dict[str, Any]]:
    """The records of a run's metrics file."""
    return [json.loads(line) for line in Path(metrics).read_text().splitlines()]


def recorded(metrics: Path, *argv: str, **options: Any) -> tuple[list[dict[str, Any]], str]:
    """The records of the steps of a run that writes this metrics file, and what the run prints."""
    out = trained(*argv, "--metrics-file", str(metrics), **options)
    return [record for record in records_of(metrics) if "lm_loss" in record], out


def program(
    name: str, *argv: object, processes: int = 1, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """As `pretrain`, of another module that has a `main`: as `python -m` does, without the imports again."""
    with tempfile.TemporaryDirectory() as directory, Run(Path(directory), processes, name) as run:
        for rank in range(processes):
            run.start(rank, *map(str, argv), **extra)
        statuses = run.statuses(timeout)
        out, err = ("".join(map(kind, range(processes))) for kind in (run.out, run.err))
    status = next((status for status in statuses.values() if status), 0)
    return subprocess.CompletedProcess([name, *argv], status, out, err)


def forked(target: Callable[..., object], *given: object, stdout: str | Path, **more: str) -> None:
    """Call `target` in a process of its own, without the imports again; its stdout is an open file's path.

    `more` joins the environment.
    """
    process = CONTEXT.Process(target=_call, args=(str(stdout), environment(**more), target, given))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def _call(
    stdout: str, place: dict[str, str], target: Callable[..., object], given: tuple[object, ...]
) -> None:
    os.dup2(os.open(stdout, os.O_WRONLY), 1)
    os.environ.clear()
    os.environ.update(place)
    target(*given)


def refusal(
    call: Callable[..., object], *given: Any, error: type[Exception] = ValueError, **more: Any
) -> str:
    """What a call that must fail says, which is one line."""
    with pytest.raises(error, match=r".") as refused:
        call(*given, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def flipped(content: bytes, bit: int) -> bytes:
    """Bytes of which one bit is another one; negative numbers count from the end."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def nightly(*values: object, id: str | None = None) -> Any:
    """A case of a parametrised test that runs nightly alone."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


def free_port() -> int:
    """A free TCP port that no other call returns soon."""
    for port in _ports(os.getpid()):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those do who will listen on it
            try:
                free.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")


@cache
def _ports(process: int) -> Iterator[int]:
    """Each process counts on from a different start, within ports reserved for its test worker.

    Nobody else takes them before they are used: they are above those of SLURM's steps, which SLURM numbers
    (port_of in distributed/slurm.py), and below those that a kernel gives to whoever connects or asks for
    any.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(30_000, 32_768))[worker::workers]
    first = random.SystemRandom().randrange(len(ports))
    return itertools.cycle(ports[first:] + ports[:first])


def wait_until(condition: Callable[[], object], seconds: float = 120, every: float = 0.01) -> None:
    """Wait until `condition` holds, polling; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not after {seconds} s"
        time.sleep(every)


def rank_main(
    directory: Path, name: str, place: dict[str, str], flags: list[str], change: Callable[[], object] | None
) -> None:
    """One rank, as a launcher would start it; `change` is done to the program before."""
    import torch

    program = importlib.import_module(name)
    alone = name in {f"megatron_zpp.{each.module}" for each in COMMANDS.values() if not each.of_ranks}
    main = partial(run_tool, program.main) if alone else program.main
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = directory / f"{place['RANK']}.{kind}"
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    faulthandler.enable()  # a crash in native code says where
    os.environ.clear()
    os.environ.update(place)
    multiprocessing.set_start_method(None, force=True)  # or its workers would come from a server of their own
    torch.set_num_threads(1)  # it was imported without OMP_NUM_THREADS
    os.chdir(ROOT)
    sys.argv = [f"{name.rpartition('.')[2]}.py", *flags]
    if change:
        change()
    main()


def holding(file: Path, after: int, path: str = "") -> dict[str, str]:
    """Environment in which ranks wait in micro-batch `after` of a start while `file`, now made, is there.

    `path` is more of the PYTHONPATH.
    """
    file.touch()
    place = f"{ROOT / 'tests' / 'hold'}{path and ':' + path}"
    return {"PYTHONPATH": place, "HOLD": str(file), "HOLD_AFTER": str(after)}


def ended(process_id: int) -> bool:
    """Whether a process has ended; where nobody reaps orphans, as in some containers, it is still listed."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Run:
    """Ranks of a program, each with its own settings; those that a test does not start are missing.

    They are forked from a process that has imported everything, in milliseconds, and are processes like any
    others: own pid, own connections, own exit status. No launcher ends them. Use it in a `with` block.
    """

    def __init__(self, directory: Path, world: int, name: str = "pretrain_gpt") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._world, self._name = directory, world, name
        self.port = str(free_port())
        self.processes: dict[int, multiprocessing.process.BaseProcess] = {}

    def start(self, rank: int, *flags: str, change: Callable[[], object] | None = None, **place: str) -> None:
        """`place` overrides variables of the environment."""
        world = str(self._world)
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            **place,
        }
        argv = (self._directory, self._name, environment(**place), list(flags), change)
        self.processes[rank] = CONTEXT.Process(target=rank_main, args=argv)
        self.processes[rank].start()

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Wait until rank 0 has printed `text`; fail if it ends earlier."""
        wait_until(lambda: text in self.out(0) or not self.processes[0].is_alive(), seconds)
        assert text in self.out(0), self.err(0)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def statuses(self, seconds: float = 240) -> dict[int, int]:
        """The exit status of each rank; fails if a rank does not end in time."""
        deadline = time.monotonic() + seconds
        for rank, process in self.processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} is still there: {self.err(rank)}"
        return {rank: process.exitcode for rank, process in self.processes.items()}

    def out(self, rank: int) -> str:
        """The stdout of a rank."""
        return self._said(rank, "out")

    def err(self, rank: int) -> str:
        """The stderr of a rank."""
        return self._said(rank, "err")

    def said_at(self, rank: int) -> float:
        """When a rank last wrote to stderr, in seconds of time.time()."""
        return (self._directory / f"{rank}.err").stat().st_mtime

    def errors(self) -> list[str]:
        """The lines that end ranks."""
        lines = [line for rank in self.processes for line in self.err(rank).splitlines()]
        return [line for line in lines if "error: " in line]

    def _said(self, rank: int, kind: str) -> str:
        path = self._directory / f"{rank}.{kind}"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
