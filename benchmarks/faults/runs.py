"""Runs that are disturbed and started again until they are complete, compared with undisturbed ones."""

import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.faults.children import Job
from benchmarks.faults.injection import SLOW, Calls, Fault
from benchmarks.faults.outcomes import digest, losses, problem
from benchmarks.faults.settings import Setting, make_data
from megatron_zpp.checkpoint.directory import committed

STARTS = 5
PATIENCE = 300  # seconds, on a busy machine
UNWATCHED = ["--heartbeat-timeout", "0"]  # nobody is lost there, however busy the machine is
WATCHED = "--heartbeat-timeout 20 --distributed-timeout-minutes 1".split()


@dataclass(frozen=True)
class Whole:
    """What an undisturbed run of a setting ends with."""

    digest: str
    losses: dict[int, float]
    calls: dict[bool, list[int]]  # of each rank, by whether the run began with checkpoints
    seconds: float


class Runs:
    """Runs below `directory`; `settings` share its data."""

    def __init__(self, directory: Path, settings: tuple[Setting, ...]) -> None:
        self._directory, self._settings, self._calls = directory, settings, Calls()
        self._data = directory / "data"
        if not self._data.exists():
            make_data(self._data)
        self._whole: dict[int, Whole] = {}

    def _finish(
        self,
        job: Job,
        setting: Setting,
        run: Path,
        whole: Whole,
        allowed: Collection[int] = (),
        *,
        one_for_all: bool = False,
    ) -> tuple[str, str]:
        """Judge what the ranks of a disturbed run said, start it until it is complete, and compare.

        They may have ended by SIGKILL, with 0, with 1 and one line, or with a status of `allowed`. One rank
        of each node has a line, or (`one_for_all`) one rank of the job if all may have the same message.
        """
        failed = {one for one, status in job.statuses.items() if status == 1}
        local = setting.local or setting.world  # one rank of a node may speak for all of it
        told = {one // local for one in failed if "error: " in job.stderr(one)}
        silent = set() if one_for_all and told else {one // local for one in failed} - told
        odd = set(job.statuses.values()) - {0, 1, -signal.SIGKILL, *allowed}
        if odd or silent or any(problem(job.stderr(one)) for one in failed):
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
            setting, half = self._settings[index], self._before(index)
            run, again = (self._directory / f"{kind}-{index}" for kind in ("whole", "again"))
            for earlier in (run, half):
                shutil.rmtree(earlier, ignore_errors=True)
            began = time.monotonic()
            calls, seconds = {False: self._counted(setting, run, [])}, time.monotonic() - began
            self._counted(setting, half, ["--exit-interval", "2"])
            shutil.copytree(half, again)
            calls[True] = self._counted(setting, again, [])
            whole = Whole(digest(run / "checkpoints"), losses(run / "metrics.jsonl"), calls, seconds)
            assert digest(again / "checkpoints") == whole.digest, setting.name
            shutil.rmtree(again)
            self._whole[index] = whole
        return self._whole[index]

    @contextmanager
    def _begun(self, index: int, number: int, *, resumed: bool) -> Iterator[Path]:
        """The directory of a run, new or with what the first half of a whole one leaves; removed behind."""
        run = self._directory / f"run-{number}"
        if resumed:
            shutil.copytree(self._before(index), run)
        else:
            run.mkdir()
        try:
            yield run
        finally:
            shutil.rmtree(run, ignore_errors=True)

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
        *,
        first: Callable[[int], object] = lambda rank: None,
        log: str = "",
    ) -> Job:
        """Start all ranks; `fault` happens on one of them, or on all if none is named; each calls `first`."""

        def prepare(this: int) -> None:
            torch.set_num_threads(1)  # replaces torch's pool in a fork; two threads that do so at once clash
            first(this)
            if fault and rank in (None, this):
                self._calls.arm(run, fault)
            if fault and rank is None:
                count_at_exit(self._calls, run / f"calls-{this}")

        logs = self._directory / "logs" / f"{run.name}{log}"
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
