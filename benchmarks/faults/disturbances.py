"""Runs of several processes: killed, stopped, signalled, cut off, starved of memory, started twice."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faults.children import Job
from benchmarks.faults.network import FAULTS as OF_NETWORKS
from benchmarks.faults.network import Link
from benchmarks.faults.outcomes import GOOD, checkpoints_in
from benchmarks.faults.runs import PATIENCE, WATCHED, Runs, Whole
from benchmarks.faults.settings import Setting

# The last three before the imports are done.
STOPPED = (75, 130, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)
MEMORY = Path("/sys/fs/cgroup/memory")  # of version 1
Judged = tuple[str, tuple[str, str]]  # the fault; its outcome and details


@dataclass(frozen=True)
class Case:
    """A run of a setting, what it ends with if nothing disturbs it, and what draws its fault."""

    setting: Setting
    run: Path
    whole: Whole
    draw: random.Random

    def rank(self) -> int:
        """One of its ranks."""
        return self.draw.randrange(self.setting.world)

    def wait_a_moment(self) -> None:
        """Let some part of the run pass, or all of it."""
        time.sleep(self.draw.random() * 1.05 * self.whole.seconds)


class Disturbances(Runs):
    """A case is a kind of fault at a random moment of a setting's run."""

    def case(self, number: int, seed: int) -> tuple[str, str, str]:
        """One case, which follows from the seed and its number: its fault, how it ended, and details."""
        draw = random.Random(f"{seed}/{number}")
        index = number % len(self._settings)
        setting, whole = self._settings[index], self._undisturbed(index)
        kind = draw.choice(self._kinds())
        with self._begun(index, number, resumed=draw.random() < 0.3) as run:
            name, (outcome, detail) = kind(Case(setting, run, whole, draw))
        return name, outcome, f"case {number}, {setting.name}: {detail}"

    def _kinds(self) -> Sequence[Callable[[Case], Judged]]:
        kinds = [self._kill_rank, self._kill_node, self._kill_all, self._signal, self._stop]
        kinds += [self._twice, self._damage_checkpoint, self._damage_cache]
        kinds += [self._memory] * MEMORY.exists()
        return kinds + [self._network] * 2 * (os.geteuid() == 0)

    def _after_a_moment(self, case: Case) -> Job:
        job = self._start(case.setting, case.run, WATCHED)
        case.wait_a_moment()
        return job

    def _judge(
        self, name: str, job: Job, case: Case, allowed: tuple[int, ...] = (), *, one_for_all: bool = False
    ) -> Judged:
        if not job.wait(PATIENCE):
            ended = dict(job.statuses)
            job.kill()
            logs = " | ".join(job.log(rank)[-500:] for rank in range(case.setting.world))
            return name, ("hang", f"{ended} {logs}")
        finished = self._finish(job, case.setting, case.run, case.whole, allowed, one_for_all=one_for_all)
        return name, finished

    def _kill_rank(self, case: Case) -> Judged:
        job = self._after_a_moment(case)
        job.send(case.rank(), signal.SIGKILL)
        return self._judge("a rank is killed", job, case)

    def _kill_node(self, case: Case) -> Judged:
        job = self._after_a_moment(case)
        local = case.setting.local or case.setting.world
        first = case.rank() // local * local
        for rank in range(first, first + local):
            job.send(rank, signal.SIGKILL)
        return self._judge("a node is killed", job, case)

    def _kill_all(self, case: Case) -> Judged:
        """As a launcher that is killed takes its ranks along."""
        job = self._after_a_moment(case)
        job.kill()
        return self._judge("all ranks are killed", job, case)

    def _signal(self, case: Case) -> Judged:
        number = case.draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
        job = self._after_a_moment(case)
        everybody = case.draw.random() < 0.5
        for rank in range(case.setting.world) if everybody else [case.rank()]:
            job.send(rank, number)
        return self._judge(number.name, job, case, STOPPED)

    def _stop(self, case: Case) -> Judged:
        """SIGSTOP for 2 s, of which nobody need take notice, or for good."""
        job = self._after_a_moment(case)
        rank, short = case.rank(), case.draw.random() < 0.5
        job.send(rank, signal.SIGSTOP)
        if short:
            time.sleep(2)
            job.send(rank, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while not job.poll() and len(job.statuses) < case.setting.world - (not short):
            if time.monotonic() > deadline:
                job.kill()
                return "a rank stops", ("hang", job.log(0)[-900:])
            time.sleep(0.02)
        job.send(rank, signal.SIGKILL)
        return self._judge(f"a rank stops{' for 2 s' * short}", job, case)

    def _twice(self, case: Case) -> Judged:
        """The same command again while the first runs: one of them must be refused in one line."""
        job = self._after_a_moment(case)
        other = self._start(case.setting, case.run, WATCHED, log="other")
        for each in (other, job):
            if not each.wait(PATIENCE):
                each.kill()
                return "two runs at once", ("hang", each.log(0)[-700:])
        # The first one before it is started again: that replaces its logs.
        first = self._judge("two runs at once", job, case, one_for_all=True)
        return self._judge(first[0], other, case, one_for_all=True) if first[1][0] in GOOD else first

    def _damage(self, files: list[Path], draw: random.Random) -> None:
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        if content and draw.random() < 0.7:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content) + 1) :]
        file.write_bytes(content)

    def _damage_checkpoint(self, case: Case) -> Judged:
        """A file of the newest checkpoint is damaged; the run begins from the one before, or anew."""
        job = self._after_a_moment(case)
        job.kill()
        there = checkpoints_in(case.run / "checkpoints")
        if len(there) > 1:
            self._damage(sorted(there[0].iterdir()), case.draw)
            job = self._start(case.setting, case.run, WATCHED)  # also if the run was complete
        return self._judge("killed, newest checkpoint damaged", job, case)

    def _damage_cache(self, case: Case) -> Judged:
        """A file of the cached order or tokens, or a hint beside the checkpoints, is damaged."""
        job = self._after_a_moment(case)
        job.kill()
        files = [path for path in (case.run / "cache").rglob("*") if path.is_file()]
        files += [path for path in (case.run / "checkpoints").glob("*") if path.is_file()]
        if files:
            self._damage(sorted(files), case.draw)
            job = self._start(case.setting, case.run, WATCHED)
        return self._judge("killed, cache or hint damaged", job, case)

    def _memory(self, case: Case) -> Judged:
        """The kernel's OOM killer takes a rank whose memory has a limit."""
        group = MEMORY / f"zpp-{os.getpid()}"
        group.mkdir(exist_ok=True)
        victim, limit = case.rank(), case.draw.randint(8, 60)
        (group / "memory.limit_in_bytes").write_text(f"{limit}M")

        def enter(rank: int) -> None:
            if rank == victim:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        job = self._start(case.setting, case.run, WATCHED, first=enter)
        judged = self._judge("OOM kill", job, case)
        group.rmdir()
        return judged

    def _network(self, case: Case) -> Judged:
        """Two nodes whose link fails; it is whole again when the run is started again."""
        setting, draw = case.setting, case.draw
        fault, node, local = draw.choice(OF_NETWORKS), draw.randrange(2), setting.world // 2
        split = replace(setting, local=local) if setting.local else setting
        link = Link(f"zpp-{os.getpid()}")

        def enter(rank: int) -> None:
            link.enter(rank // local)
            # Both nodes have this host's name, which is an address of neither.
            os.environ.update(MASTER_ADDR=link.address(0), GLOO_SOCKET_IFNAME=Link.INTERFACE)

        try:
            job = self._start(split, case.run, WATCHED, first=enter)
            case.wait_a_moment()
            link.fail(fault, node)
            if fault == "cut for 3 s":
                time.sleep(3)
                link.mend()
            return self._judge(f"network: {fault}", job, replace(case, setting=split))
        finally:
            link.remove()
