"""A copy of the repository in which tests meet a planted bug."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutations.executed import ROOT, environment

ORDER, STARTED, FAILED = "MUTATION_ORDER", "MUTATION_STARTED", "MUTATION_FAILED"  # files, by environment
IGNORED = shutil.ignore_patterns(*".git .venv build mine quickstart wandb .*_cache".split())


@dataclass(frozen=True)
class Tested:
    """How tests ended: pytest's status, None at the limit, and those that failed, or ran too long by then."""

    status: int | None
    failed: tuple[str, ...]
    seconds: float
    ran: float = 0.0  # how long the test had run that ran at the limit


class Tree:
    """The copy `number` in a directory that also has `kernels`, the cache of built libraries."""

    def __init__(self, directory: Path, number: int) -> None:
        self.root, self._scratch = directory / str(number), directory / f"{number}t"
        shutil.copytree(ROOT, self.root, ignore=IGNORED)
        (self.root / ".venv").symlink_to(sys.prefix)
        self._mark = f"{os.getpid()}-{number}"

    def write(self, file: str, source: str) -> None:
        """Replace a file; Python must not take the old one for it because size and second are the same."""
        (self.root / file).write_text(source)
        for compiled in (self.root / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            compiled.unlink()

    def run(self, tests: list[str], limit: float, patience: Callable[[str], float], *flags: str) -> Tested:
        """Run tests in this order, with flags of pytest; all processes that they start end with them.

        At the limit, a test has failed if it runs for longer than its patience.
        """
        self._scratch.mkdir()
        shutil.copytree(self.root.parent / "kernels", self._scratch / "kernels")
        files = {name: self._scratch / name for name in (ORDER, STARTED, FAILED)}
        files[ORDER].write_text(json.dumps(tests))
        settings = {**environment(), **{name: str(path) for name, path in files.items()}}
        settings |= {"MUTATION_TREE": self._mark, "TMPDIR": str(self._scratch)}
        settings |= {"MEGATRON_ZPP_CACHE": str(self._scratch / "kernels")}
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.mutations.tree", *flags, *tests]
        began = time.time()
        with (self._scratch / "output").open("w") as said:
            pytest = subprocess.Popen(
                command, cwd=self.root, env=settings, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            try:
                status: int | None = pytest.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            ended = time.time()
            end_all(f"MUTATION_TREE={self._mark}")
            pytest.wait()
        failed, ran = [], 0.0
        if files[FAILED].exists():
            failed = files[FAILED].read_text().splitlines()
        elif status is None and files[STARTED].exists():
            running, since = json.loads(files[STARTED].read_text())
            ran = ended - since
            failed = [running] if ran > patience(running) else []
        shutil.rmtree(self._scratch, ignore_errors=True)
        return Tested(status, tuple(failed), round(ended - began, 1), ran)


def end_all(variable: str) -> None:
    """Kill all processes with this in their environment, also those that they start meanwhile."""
    for _ in range(50):
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if variable.encode() in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return
        time.sleep(0.1)


# Hooks of the pytest that a tree starts.


def pytest_configure(config: Any) -> None:
    """Put the tests into their order after tests/conftest.py has."""
    if ORDER in os.environ:
        config.pluginmanager.register(_Ordered())


class _Ordered:
    def pytest_collection_finish(self, session: Any) -> None:
        tests = json.loads(Path(os.environ[ORDER]).read_text())
        places = {test: place for place, test in enumerate(tests)}
        session.items.sort(key=lambda item: places[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs since when."""
    if STARTED in os.environ:
        Path(os.environ[STARTED]).write_text(json.dumps([nodeid, time.time()]))


def pytest_runtest_logreport(report: Any) -> None:
    """Say which test failed."""
    if report.failed and FAILED in os.environ:
        with Path(os.environ[FAILED]).open("a") as file:
            file.write(f"{report.nodeid}\n")
