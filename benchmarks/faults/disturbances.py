"""Runs of several processes: killed, stopped, signalled, cut off, starved of memory, started twice."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.children import Job
from benchmarks.faults.network import FAULTS as OF_NETWORKS
from benchmarks.faults.network import Link
from benchmarks.faults.outcomes import checkpoints_in
from benchmarks.faults.runs import PATIENCE, WATCHED, Runs, Whole
from benchmarks.faults.settings import Setting

STOPPED = (
    75,
    130,
    -signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGUSR1,
)  # the last three before the imports are done
MEMORY = Path("/sys/fs/cgroup/memory")  # of version 1
Outcome = tuple[str, str]
Disturb = Callable[[Setting, Path, Whole, random.Random], tuple[str, Outcome]]


class Disturbances(Runs):
    """A case is a kind of fault at a random moment of a setting's run."""

    def case(self, number: int, seed: int) -> tuple[str, str, str]:
        """One case, which follows from the seed and its number: its fault, how it ended, and details."""
        draw = random.Random(f"{seed}/{number}")
        index = number % len(self._settings)
        setting, whole = self._settings[index], self._undisturbed(index)
        run = self._directory / f"run-{number}"
        kind = draw.choice(self._kinds())
        if draw.random() < 0.3:
            shutil.copytree(self._before(index), run)
        else:
            run.mkdir()
        try:
            name, (outcome, detail) = kind(setting, run, whole, draw)
        finally:
            shutil.rmtree(run, ignore_errors=True)
        return name, outcome, f"case {number}, {setting.name}: {detail}"

    def _kinds(self) -> list[Disturb]:
        kinds: list[Disturb] = [self._kill_rank, self._kill_node, self._kill_all, self._signal, self._stop]
        kinds += [self._twice, self._damage_checkpoint, self._damage_cache]
        kinds += [self._memory] * MEMORY.exists()
        return kinds + [self._network] * 2 * (os.geteuid() == 0)

    def _after_a_moment(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> Job:
        job = self._start(setting, run, WATCHED)
        self._moment(whole, draw)
        return job

    def _moment(self, whole: Whole, draw: random.Random) -> None:
        time.sleep(draw.random() * 1.05 * whole.seconds)

    def _judge(
        self,
        name: str,
        job: Job,
        setting: Setting,
        run: Path,
        whole: Whole,
        allowed: tuple[int, ...] = (),
        *,
        one_for_all: bool = False,
    ) -> tuple[str, Outcome]:
        if not job.wait(PATIENCE):
            ended = dict(job.statuses)
            job.kill()
            return name, (
                "hang",
                f"{ended} " + " | ".join(job.log(rank)[-500:] for rank in range(setting.world)),
            )
        return name, self._finish(job, setting, run, whole, allowed, one_for_all=one_for_all)

    def _kill_rank(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        job = self._after_a_moment(setting, run, whole, draw)
        job.send(draw.randrange(setting.world), signal.SIGKILL)
        return self._judge("a rank is killed", job, setting, run, whole)

    def _kill_node(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        job = self._after_a_moment(setting, run, whole, draw)
        local = setting.local or setting.world
        node = draw.randrange(setting.world // local)
        for rank in range(node * local, (node + 1) * local):
            job.send(rank, signal.SIGKILL)
        return self._judge("a node is killed", job, setting, run, whole)

    def _kill_all(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """As a launcher that is killed takes its ranks along."""
        job = self._after_a_moment(setting, run, whole, draw)
        job.kill()
        return self._judge("all ranks are killed", job, setting, run, whole)

    def _signal(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        number = draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
        job = self._after_a_moment(setting, run, whole, draw)
        everybody = draw.random() < 0.5
        for rank in range(setting.world) if everybody else [draw.randrange(setting.world)]:
            job.send(rank, number)
        return self._judge(f"{number.name}", job, setting, run, whole, STOPPED)

    def _stop(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        """SIGSTOP for 2 s, of which nobody need take notice, or for good."""
        job = self._after_a_moment(setting, run, whole, draw)
        rank, short = draw.randrange(setting.world), draw.random() < 0.5
        job.send(rank, signal.SIGSTOP)
        if short:
            time.sleep(2)
            job.send(rank, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while not job.poll() and len(job.statuses) < setting.world - (not short):
            if time.monotonic() > deadline:
                job.kill()
                return "a rank stops", ("hang", job.log(0)[-900:])
            time.sleep(0.02)
        job.send(rank, signal.SIGKILL)
        return self._judge(f"a rank stops{' for 2 s' * short}", job, setting, run, whole)

    def _twice(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        """The same command again while the first runs: one of them must be refused in one line."""
        job = self._after_a_moment(setting, run, whole, draw)
        other = self._start(setting, run, WATCHED, log="other")
        if not other.wait(PATIENCE):
            other.kill()
            return "two runs at once", ("hang", other.log(0)[-700:])
        if not job.wait(PATIENCE):
            job.kill()
            return "two runs at once", ("hang", job.log(0)[-700:])
        # The first one before it is started again: that replaces its logs.
        name, outcome = self._judge("two runs at once", job, setting, run, whole, one_for_all=True)
        return name, outcome if outcome[0] not in ("equal", "one line, then equal") else self._finish(
            other, setting, run, whole, one_for_all=True
        )

    def _damage(self, files: list[Path], draw: random.Random) -> None:
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        if content and draw.random() < 0.7:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content) + 1) :]
        file.write_bytes(content)

    def _damage_checkpoint(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """A file of the newest checkpoint is damaged; the run begins from the one before, or anew."""
        job = self._after_a_moment(setting, run, whole, draw)
        job.kill()
        there = checkpoints_in(run / "checkpoints")
        if len(there) > 1:
            self._damage(sorted(there[0].iterdir()), draw)
            job = self._start(setting, run, WATCHED)  # also if the run was complete
        return self._judge("killed, newest checkpoint damaged", job, setting, run, whole)

    def _damage_cache(
        self, setting: Setting, run: Path, whole: Whole, draw: random.Random
    ) -> tuple[str, Outcome]:
        """A file of the cached order or tokens, or a hint beside the checkpoints, is damaged."""
        job = self._after_a_moment(setting, run, whole, draw)
        job.kill()
        files = [path for path in (run / "cache").rglob("*") if path.is_file()]
        files += [path for path in (run / "checkpoints").glob("*") if path.is_file()]
        if files:
            self._damage(sorted(files), draw)
            job = self._start(setting, run, WATCHED)
        return self._judge("killed, cache or hint damaged", job, setting, run, whole)

    def _memory(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        """The kernel's OOM killer takes a rank whose memory has a limit."""
        group = MEMORY / f"zpp-{os.getpid()}"
        group.mkdir(exist_ok=True)
        victim, limit = draw.randrange(setting.world), draw.randint(8, 60)
        (group / "memory.limit_in_bytes").write_text(f"{limit}M")

        def enter(rank: int) -> None:
            if rank == victim:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        job = self._start(setting, run, WATCHED, first=enter)
        judged = self._judge("OOM kill", job, setting, run, whole)
        group.rmdir()
        return judged

    def _network(self, setting: Setting, run: Path, whole: Whole, draw: random.Random) -> tuple[str, Outcome]:
        """Two nodes whose link fails; it is whole again when the run is started again."""
        fault, node, local = draw.choice(OF_NETWORKS), draw.randrange(2), setting.world // 2
        split = replace(setting, local=local) if setting.local else setting
        link = Link(f"zpp-{os.getpid()}")

        def enter(rank: int) -> None:
            link.enter(rank // local)
            # Both nodes have this host's name, which is an address of neither.
            os.environ.update(MASTER_ADDR=link.address(0), GLOO_SOCKET_IFNAME=Link.INTERFACE)

        try:
            job = self._start(split, run, WATCHED, first=enter)
            self._moment(whole, draw)
            link.fail(fault, node)
            if fault == "cut for 3 s":
                time.sleep(3)
                link.mend()
            return self._judge(f"network: {fault}", job, split, run, whole)
        finally:
            link.remove()
