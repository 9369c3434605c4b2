"""How long a process waits between two looks at files that another process is writing."""

import random
from collections.abc import Iterator

LONGEST = 1.0  # seconds
ATTEMPT_SECONDS = 2.0  # on average, between attempts to lock what a live process most likely still holds


def growing_waits(first: float) -> Iterator[float]:
    """Yield seconds: about `first`, each half as long again as the one before, at most LONGEST.

    So the end of short work is noticed at once, and 1,024 processes that wait for long work look some 1,400
    times per second in total. Each wait is shorter by up to a half, at random, so that processes that began
    together do not look together.
    """
    wait = first
    while True:
        yield wait * random.uniform(0.5, 1)
        wait = min(wait * 1.5, LONGEST)


def attempt_wait() -> float:
    """Return the seconds until the next attempt to lock; random, as in `growing_waits`."""
    return ATTEMPT_SECONDS * random.uniform(0.5, 1.5)
