"""Names the test to coverage, also in processes from the fork server: `pytest -p tests.line_contexts`.

Other processes take the name from the environment when they start (tests/coverage.ini).
"""

import multiprocessing.forkserver
import os
from collections.abc import Iterator
from typing import Any

import pytest
from coverage import Coverage

from tests.forkserver import CONTEXT


def switch(test: str) -> None:
    """From here on this process, and those that it forks, execute lines for `test`."""
    if coverage := Coverage.current():
        coverage.set_option("run:context", test)
        coverage.switch_context(test)


class NamedProcess(CONTEXT.Process):  # type: ignore[name-defined]
    """A process of the fork server, whose environment names the test that first used it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "none")

    def run(self) -> None:
        switch(self.test)
        super().run()


def pytest_sessionstart() -> None:
    CONTEXT.Process = NamedProcess  # type: ignore[misc]
    multiprocessing.forkserver.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    switch(f"{item.nodeid} (setup)")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    switch(f"{item.nodeid} (call)")
    return (yield)


def pytest_sessionfinish() -> None:
    """A worker of pytest-xdist ends without running what Python runs at exit."""
    if coverage := Coverage.current():
        coverage.save()
