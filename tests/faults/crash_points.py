"""Runs in which something goes wrong at one call on a file, and what they end with: `campaign.py` has the cases."""

import errno
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.checkpoint.directory import committed
from tests.children import Job
from tests.faults.injection import CLOCK, KILL, PART, SLOW, Calls, Fault
from tests.faults.outcomes import digest, losses, problem
from tests.faults.settings import Setting, make_data

STARTS = 5
PATIENCE = 300  # seconds, on a busy machine
UNWATCHED = ["--heartbeat-timeout", "0"]  # nobody is lost there, however busy the machine is
WATCHED = ["--heartbeat-timeout", "30"]
YEAR = 365 * 86400  # seconds
FAULTS = (  # of which a case has one: what, its argument, its name
    (KILL, 0, "kill at a call"),
    (KILL, 0, "kill at a call"),
    (KILL, 0, "kill at a call"),
    (KILL, 1, "kill at a call, survivors end themselves"),
    (errno.EIO, 0, "EIO at a call"),
    (errno.ESTALE, 0, "ESTALE at a call"),
    (errno.EMFILE, 0, "EMFILE at a call"),
    (errno.ENOSPC, 0, "ENOSPC at a call"),
    (errno.ENOSPC, 1, "disk full from a call on"),
    (errno.EDQUOT, 1, "quota used up from a call on"),
    (errno.EROFS, 1, "read-only from a call on"),
    (PART, 0, "half read or written at a call"),
    (SLOW, 5, "slow from a call on"),
    (CLOCK, -YEAR, "clock goes back a year at a call"),
    (CLOCK, 10 * YEAR, "clock goes on ten years at a call"),
)


@dataclass(frozen=True)
class Whole:
    """What an undisturbed run of a setting ends with."""

    digest: str
    losses: dict[int, float]
    calls: dict[bool, list[int]]  # of each rank, by whether the run began with checkpoints


class CrashPoints:
    """Cases in `directory`; `settings` share its data."""

    def __init__(self, directory: Path, settings: tuple[Setting, ...]) -> None:
        self._directory, self._settings, self._calls = directory, settings, Calls()
        self._data = directory / "data"
        if not self._data.exists():
            make_data(self._data)
        self._whole: dict[int, Whole] = {}

    def case(self, number: int, seed: int) -> tuple[str, str, str]:
        """One case, which follows from the seed and its number: its fault, how it ended, and details."""
        draw = random.Random(f"{seed}/{number}")
        index = number % len(self._settings)
        setting = self._settings[index]
        what, argument, name = draw.choice(FAULTS)
        began = draw.random() < 0.5
        whole = self._undisturbed(index)
        rank = draw.randrange(setting.world)
        fault = Fault(what, draw.randint(1, whole.calls[began][rank]), argument)
        run = self._directory / f"run-{number}"
        if began:
            shutil.copytree(self._before(index), run)
        else:
            run.mkdir()
        try:
            outcome, detail = self._disturb(setting, run, rank, fault, whole)
        finally:
            shutil.rmtree(run, ignore_errors=True)
        told = f"case {number}, {setting.name}, {'resumed' if began else 'new'}, rank {rank}, call {fault.call}"
        return name, outcome, f"{told}: {detail}"

    def _disturb(
        self, setting: Setting, run: Path, rank: int, fault: Fault, whole: Whole
    ) -> tuple[str, str]:
        job = self._start(setting, run, WATCHED, rank, fault)
        if not self._ended(job, rank, fault):
            job.kill()
            return "hang", job.log(0)[-700:]
        failed = {one for one, status in job.statuses.items() if status == 1}
        said = [one for one in failed if problem(job.stderr(one)) is None]
        odd = set(job.statuses.values()) - {0, 1, -signal.SIGKILL}
        if odd or (failed and not said) or any(problem(job.stderr(one)) for one in failed if job.stderr(one)):
            logs = " | ".join(job.log(one)[-900:] for one in job.statuses)
            return "not one line", f"{job.statuses} {logs}"
        first = "equal" if not failed else "one line, then equal"
        for _ in range(STARTS):
            if set(job.statuses.values()) == {0}:
                return self._compare(run, whole, first)
            job = self._start(setting, run, WATCHED)
            if not job.wait(PATIENCE):
                job.kill()
                return "hang after a restart", job.log(0)[-700:]
        return "never complete", " | ".join(job.log(one)[-700:] for one in job.statuses)

    def _ended(self, job: Job, rank: int, fault: Fault) -> bool:
        """Whether all ranks end; the others of a killed one are killed unless they are to find out."""
        deadline = time.monotonic() + PATIENCE
        while not job.poll():
            if fault.what == KILL and not fault.argument and job.statuses.get(rank) == -signal.SIGKILL:
                job.kill()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _compare(self, run: Path, whole: Whole, outcome: str) -> tuple[str, str]:
        """Compare a complete run with the undisturbed one."""
        checkpoints = run / "checkpoints"
        if (found := digest(checkpoints)) != whole.digest:
            return "different", found
        try:
            logged = losses(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else {}
        except ValueError as error:
            return "damaged metrics", repr(error)
        wrong = {step: loss for step, loss in logged.items() if loss != whole.losses[step]}
        if wrong:
            return "different losses", str(wrong)
        kept = {path.name for path in committed(checkpoints).values()}
        there = {path.name for path in checkpoints.iterdir() if path.is_dir()}
        doomed = {name for name in there - kept if name.endswith((".partial", ".retired"))}
        if there != kept | doomed or len(doomed) > 1:  # one that the next save would remove
            return "leftovers", str(sorted(there - kept))
        return outcome, ""

    def _undisturbed(self, index: int) -> Whole:
        """What a run of a setting ends with, and the checkpoints and caches of its first half, made once."""
        if index not in self._whole:
            setting, run, half = self._settings[index], self._directory / f"whole-{index}", self._before(index)
            shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(half, ignore_errors=True)
            calls = {False: self._counted(setting, run, [])}
            self._counted(setting, half, ["--exit-interval", "2"])
            again = self._directory / f"again-{index}"
            shutil.copytree(half, again)
            calls[True] = self._counted(setting, again, [])
            whole = Whole(digest(run / "checkpoints"), losses(run / "metrics.jsonl"), calls)
            assert digest(again / "checkpoints") == whole.digest, setting.name
            shutil.rmtree(again)
            self._whole[index] = whole
        return self._whole[index]

    def _before(self, index: int) -> Path:
        return self._directory / f"half-{index}"

    def _counted(self, setting: Setting, run: Path, more: list[str]) -> list[int]:
        """Run to the end without a fault; the calls of each rank."""
        run.mkdir(exist_ok=True)
        job = self._start(setting, run, [*UNWATCHED, *more], None, Fault(SLOW, 10**9))
        assert job.wait(PATIENCE), f"{setting.name}: an undisturbed run does not end"
        assert set(job.statuses.values()) == {0}, job.log(0)
        return [int((run / f"calls-{rank}").read_text()) for rank in range(setting.world)]

    def _start(
        self,
        setting: Setting,
        run: Path,
        more: list[str],
        rank: int | None = None,
        fault: Fault | None = None,
    ) -> Job:
        """Start all ranks; `fault` happens on one of them, or on all if none is named."""

        def prepare(this: int) -> None:
            if fault and rank in (None, this):
                self._calls.arm(run, fault)
            if fault and rank is None:
                count_at_exit(self._calls, run / f"calls-{this}")

        logs = self._directory / "logs" / run.name
        shutil.rmtree(logs, ignore_errors=True)
        argv = [*setting.argv(self._data, run), *more]
        return Job(logs, argv, setting.world, local=setting.local, prepare=prepare)


def count_at_exit(calls: Calls, file: Path) -> None:
    """Write the number of calls to a file when pretrain_gpt.py's main returns."""
    import pretrain_gpt

    main = pretrain_gpt.main

    def counting() -> None:
        try:
            main()
        finally:
            file.write_text(str(calls.count()))

    pretrain_gpt.main = counting
