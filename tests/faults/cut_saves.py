"""Saves that are cut, by SIGKILL or an errno, at each of their calls on files."""

import errno
import itertools
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.directory import committed
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read_back import NotReadBack
from megatron_zpp.checkpoint.write import SaveFailed
from tests.checkpoint.saving import FIRST, TOKENIZER, save, small, train
from tests.children import Output, fork
from tests.faults.injection import Calls, Fault
from tests.faults.tally import Tally


def cut_saves(directory: Path, tally: Tally, seconds: float) -> None:
    """Interrupts a save at each call on a file, by a kill and by the errors of disks."""
    calls = Calls()
    engine = small()
    train(engine, 1, seed=2)
    states = directory / "none", directory / "two"  # before the save that is cut
    states[0].mkdir()
    save(states[1], engine, Progress(4, 40))
    save(states[1], engine, FIRST)
    train(engine, 1, seed=3)

    def attempt(target: Path, call: int, error: int) -> None:
        calls.arm(target, Fault(error, call))
        try:
            save(target, engine, FIRST, reads_back=True)
        except (SaveFailed, NotReadBack):
            sys.exit(7)
        sys.exit(0 if calls.count() < call else 8)

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
        steps[path.name] = engine.states.optimizer_steps
    return steps
