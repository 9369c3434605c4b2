"""Runs whose surroundings fail: launcher, reader of the log, W&B, link; or that restart with other flags."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.faults.disturbances import Disturb, Disturbances, Outcome
from tests.faults.network import DELAYED
from tests.faults.outcomes import digest, losses, problem, says_why
from tests.faults.runs import PATIENCE, UNWATCHED, WATCHED, Whole
from tests.faults.settings import Setting
from tests.support import ROOT, ended, free_port

PAGE = 4096  # bytes, the smallest pipe
IMPORTS = 10  # seconds of a start by torchrun in which ranks import torch
FIXED = ("quantized", "tensor", "zero-unit", "buddy", "fp8")  # flags of settings that keep their ranks


class Surroundings(Disturbances):
    """A case is a kind of fault outside of the ranks, or a change of flags, at a random moment."""

    def _kinds(self) -> list[Disturb]:
        kinds = [self._kill_launcher, self._full_pipe, self._reader_ends, self._kill_wandb, self._change]
        return kinds + [self._delay] * (os.geteuid() == 0)

    def _kill_launcher(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """Start a torchrun per node and kill one, which leaves its ranks behind."""
        name, local = "a launcher is killed", setting.local or setting.world
        logs = self._directory / "logs" / f"{run.name}-launchers"
        shutil.rmtree(logs, ignore_errors=True)
        launchers = self._launch(setting, run, logs, local)
        time.sleep(draw.random() * (IMPORTS + 1.05 * whole.seconds))
        victim, ranks = draw.randrange(len(launchers)), list[int]()
        try:
            if launchers[victim].poll() is None:
                launchers[victim].send_signal(signal.SIGSTOP)  # so that it starts no rank meanwhile
            ranks = [pid for launcher in launchers for pid in _children(launcher.pid)]
            launchers[victim].kill()
            if not _all_end(launchers, ranks):
                return name, ("hang", _said(logs)[-900:])
        finally:
            for pid in {*ranks, *(pid for launcher in launchers for pid in _children(launcher.pid))}:
                if not ended(pid):
                    os.kill(pid, signal.SIGKILL)
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
        said = {
            node: [file.read_text() for file in _stderr(logs / str(node))] for node in range(len(launchers))
        }
        lines = [text for texts in said.values() for text in texts]
        complete = digest(run / "checkpoints") == whole.digest
        silent = any(texts and not any(map(says_why, texts)) for texts in said.values())
        if any(map(problem, lines)) or (silent and not complete and ranks):
            return name, ("not one line", _said(logs)[-2000:])
        job = self._start(setting, run, WATCHED)
        outcome, detail = self._judge(name, job, setting, run, whole)[1]
        told = any(map(says_why, lines)) and outcome == "equal"
        return name, ("one line, then equal" if told else outcome, detail)

    def _launch(self, setting: Setting, run: Path, logs: Path, local: int) -> list[subprocess.Popen[bytes]]:
        port, found = str(free_port()), []
        nodes = setting.world // local
        for node in range(nodes):
            (logs / str(node)).mkdir(parents=True)
            argv = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(nodes),
                "--node-rank",
                str(node),
            ]
            argv += ["--nproc-per-node", str(local), "--master-addr", "127.0.0.1", "--master-port", port]
            argv += ["--redirects", "3", "--log-dir", str(logs / str(node)), str(ROOT / "pretrain_gpt.py")]
            argv += [*setting.argv(self._data, run), *WATCHED]
            with (logs / f"torchrun-{node}").open("wb") as file:
                found.append(subprocess.Popen(argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL))
        return found

    def _full_pipe(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """The log goes to a pipe that nobody reads, and which has room for a part of it."""
        reader, writer = os.pipe()
        try:
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE)
            os.write(writer, bytes(PAGE - draw.randrange(PAGE)))
            job = self._start(setting, run, WATCHED, first=lambda rank: rank or os.dup2(writer, 1))
            return self._judge("the log's pipe is full", job, setting, run, whole)
        finally:
            os.close(reader)
            os.close(writer)

    def _reader_ends(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """End the program that reads the log, such as a `tee` that is killed."""
        reader, writer = os.pipe()

        def into_the_pipe(rank: int) -> None:
            os.close(reader)
            if rank == 0:
                os.dup2(writer, 1)
            os.close(writer)

        job = self._start(setting, run, WATCHED, first=into_the_pipe)
        os.close(writer)
        self._moment(whole, draw)
        os.close(reader)
        return self._judge("the log's reader ends", job, setting, run, whole)

    def _kill_wandb(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """Kill the W&B service, without which the run must still finish."""
        name, wandb = (
            "W&B's service is killed",
            f"--wandb-project x --wandb-mode offline --wandb-save-dir {run}",
        )
        job = self._start(setting, run, [*WATCHED, *wandb.split()])
        deadline = time.monotonic() + PATIENCE
        while not (services := [pid for one in job.pids for pid in _children(one) if _is_wandb(pid)]):
            if job.poll():  # it has ended before W&B started
                break
            if time.monotonic() > deadline:
                job.kill()
                return name, ("hang", job.log(0)[-700:])
            time.sleep(0.01)
        self._moment(whole, draw)
        for pid in services:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        judged = self._judge(name, job, setting, run, whole)
        return (
            judged if judged[1][0] != "one line, then equal" else (name, ("ended the run", job.log(0)[-900:]))
        )

    def _change(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        """Kill a run and restart it with other flags: undisturbed in a copy, and with another kill."""
        job = self._after_a_moment(setting, run, whole, draw)
        job.kill()
        what, changed = draw.choice(_changes(setting, draw))
        name, copy = f"killed, then {what}", run.with_name(f"{run.name}-copy")
        try:
            shutil.copytree(run, copy)
            began = time.monotonic()
            undisturbed = self._start(changed, copy, UNWATCHED)
            if not undisturbed.wait(PATIENCE) or set(undisturbed.statuses.values()) != {0}:
                undisturbed.kill()
                return name, ("does not continue", undisturbed.log(0)[-900:])
            expected = Whole(
                digest(copy / "checkpoints"), losses(copy / "metrics.jsonl"), {}, time.monotonic() - began
            )
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        job = self._after_a_moment(changed, run, expected, draw)
        job.send(draw.randrange(changed.world), signal.SIGKILL)
        return self._judge(name, job, changed, run, expected)

    def _delay(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        return self._link_fails(DELAYED, setting, run, whole, draw)


def _changes(setting: Setting, draw: random.Random) -> list[tuple[str, Setting]]:
    """Other flags with which a run of `setting` may continue, each with its name."""
    found = []
    if "--rampup" not in setting.flags:
        batch = int(setting.flags.partition("--global-batch-size ")[2].split()[0])
        other = draw.choice((batch // 2, batch * 3 // 2, batch * 2))
        found.append(("another batch", _with(setting, f"--global-batch-size {other}")))
    if not any(flag in setting.flags for flag in FIXED):
        world, stage = draw.choice([one for one in (1, 2, 4) if one != setting.world]), draw.randrange(4)
        other_ranks = replace(_with(setting, f"--zero-stage {stage}"), world=world, local=None)
        found.append(("other ranks and another stage", other_ranks))
    return found or [("the same flags", setting)]


def _with(setting: Setting, more: str) -> Setting:
    return replace(setting, flags=f"{setting.flags} {more}")


def _children(process_id: int) -> list[int]:
    """Processes that any thread of it has started; none if it has ended."""
    found = []
    for thread in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            found += [int(pid) for pid in thread.read_text().split()]
        except OSError:  # the thread has ended
            continue
    return found


def _is_wandb(process_id: int) -> bool:
    try:
        return b"wandb" in Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return False


def _all_end(launchers: list[subprocess.Popen[bytes]], ranks: list[int]) -> bool:
    """Whether launchers and ranks end in time.

    A torchrun whose ranks have all ended may go on: it waits 300 s for the dead one (its exit barrier).
    """
    deadline = time.monotonic() + PATIENCE
    while not all(map(ended, ranks)) or any(
        launcher.poll() is None and not (ranks and all(map(ended, _children(launcher.pid))))
        for launcher in launchers
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stderr(logs: Path) -> list[Path]:
    """The files that torchrun writes the ranks' stderr to."""
    return sorted(logs.rglob("stderr.log"))


def _said(logs: Path) -> str:
    return " | ".join(
        file.read_text(errors="replace")[-700:] for file in sorted(logs.rglob("*")) if file.is_file()
    )
