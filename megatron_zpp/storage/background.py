"""Runs a call that may never return on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def started(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """The outcome of `work`, on a daemon thread, which does not keep the process alive."""
    outcome = Future[_Result]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
