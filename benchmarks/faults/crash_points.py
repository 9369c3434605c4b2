"""Runs in which something goes wrong at one call on a file."""

import errno
import random
import signal
import time
from pathlib import Path

from benchmarks.faults.children import Job
from benchmarks.faults.injection import CLOCK, KILL, SLOW, Fault
from benchmarks.faults.injection import FAULTS as DISK_FAULTS
from benchmarks.faults.runs import PATIENCE, WATCHED, Runs, Whole
from benchmarks.faults.settings import Setting

YEAR = 365 * 86400  # seconds
FAULTS = (  # of which a case has one
    *[("kill at a call", KILL, 0)] * 3,
    ("kill at a call, survivors end themselves", KILL, 1),
    *DISK_FAULTS,
    ("EMFILE at a call", errno.EMFILE, 0),
    ("ENOSPC at a call", errno.ENOSPC, 0),
    ("slow from a call on", SLOW, 5),
    ("clock jumps back a year at a call", CLOCK, -YEAR),
    ("clock jumps forward ten years at a call", CLOCK, 10 * YEAR),
)


class CrashPoints(Runs):
    """A call of one rank."""

    def case(self, number: int, seed: int) -> tuple[str, str, str]:
        """One case, which follows from the seed and its number: its fault, how it ended, and details."""
        draw = random.Random(f"{seed}/{number}")
        index = number % len(self._settings)
        setting = self._settings[index]
        name, what, argument = draw.choice(FAULTS)
        began = draw.random() < 0.5
        whole = self._undisturbed(index)
        rank = draw.randrange(setting.world)
        fault = Fault(what, draw.randint(1, whole.calls[began][rank]), argument)
        with self._begun(index, number, resumed=began) as run:
            outcome, detail = self._disturb(setting, run, rank, fault, whole)
        start = "resumed" if began else "new"
        told = f"case {number}, {setting.name}, {start}, rank {rank}, call {fault.call}"
        return name, outcome, f"{told}: {detail}"

    def _disturb(self, setting: Setting, run: Path, rank: int, fault: Fault, whole: Whole) -> tuple[str, str]:
        job = self._start(setting, run, WATCHED, rank, fault)
        if not self._ended(job, rank, fault):
            job.kill()
            return "hang", job.log(0)[-700:]
        # A failed save or load is one message, which one rank of the job says for all.
        return self._finish(job, setting, run, whole, one_for_all=True)

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
