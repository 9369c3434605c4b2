"""ordered_map: order, bounded look-ahead, and no hang whatever happens to a worker."""

import os
import threading
import time
from functools import partial

import pytest

from megatron_zpp.data.corpus.parallel_encode import ordered_map


def uneven(number: int) -> int:
    time.sleep(0.002 * (number % 7))
    return number * number


def constant(function):
    """Return `function`, as the `build` of ordered_map."""
    return function


def test_order_is_kept_and_items_are_drawn_only_as_they_are_used() -> None:
    drawn = []
    results = ordered_map(partial(constant, uneven), (drawn.append(n) or n for n in range(10_000)), workers=3)
    assert [next(results) for _ in range(100)] == [n * n for n in range(100)]
    results.close()
    assert len(drawn) < 150
    assert list(ordered_map(partial(constant, uneven), [], workers=1)) == []


def test_items_and_results_far_beyond_a_pipe() -> None:
    """Parent and worker both have megabytes to send, which must not be a deadlock."""
    sizes = [4_000_000] * 8
    items = (bytes(size) for size in sizes)
    assert [len(result) for result in ordered_map(partial(constant, bytes), items, workers=1)] == sizes


def test_a_build_that_raises() -> None:
    with pytest.raises(RuntimeError, match=r"in a worker process:\n(.|\n)*ValueError: "):
        list(ordered_map(partial(int, "no number"), range(10), workers=2))


def dies_while_it_sends(number: int) -> bytes:
    if number:
        threading.Timer(0.2, os._exit, [1]).start()
    return bytes(4_000_000)


def test_a_worker_that_dies_while_it_sends_its_result() -> None:
    results = ordered_map(partial(constant, dies_while_it_sends), range(9), workers=1)
    assert len(next(results)) == 4_000_000
    time.sleep(0.5)  # the next result does not fit into the pipe
    with pytest.raises(ChildProcessError, match="has died"):
        next(results)
