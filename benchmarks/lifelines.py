"""How soon many ranks hear that one was killed: `python benchmarks/lifelines.py [--ranks 64 256 1024]`.

Lifelines alone, of the program's own code, with real connections on one machine: threads of a few processes
are the ranks, in nodes of eight. Rank 0 and the victim have processes of their own, so that the victim can
get SIGKILL. The victim is rank 0, the first rank of the last node, or its last rank, in turns. Seconds from
the kill until half of the others, and all of them, have heard. On a cluster each rank has a core of its own;
here all of them share this machine's.
"""

import argparse
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from megatron_zpp.distributed.lifelines import Lifelines, Root
from megatron_zpp.distributed.topology import Topology

PER_NODE = 8


def run_ranks(mine: range, ranks: int, pipe: Pipe) -> None:
    """One process: the ranks `mine`; sends when each of them has heard, and what."""
    threading.stack_size(1 << 20)
    heard: dict[int, tuple[float, str]] = {}
    all_heard = threading.Event()

    def ended(rank: int) -> Callable[[str], None]:
        def hear(text: str) -> None:
            heard[rank] = (time.monotonic(), text)
            if len(heard) == len(mine):
                all_heard.set()

        return hear

    lines = [Lifelines(Topology(rank, ranks, rank % PER_NODE, PER_NODE), ended(rank), print) for rank in mine]
    if 0 in mine:
        pipe.send(lines[0].listen())
    root: Root = pipe.recv()
    for line in lines:
        line.start(root, "127.0.0.1", "benchmark")
    if 0 in mine:
        while not lines[0].complete:
            time.sleep(0.01)
        pipe.send("complete")
    if pipe.recv() == "die":
        pipe.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    all_heard.wait(60)
    pipe.send(heard)
    pipe.recv()
    os._exit(0)  # no orderly end of so many threads is needed


def kill_one(ranks: int, victim: int, processes: int) -> dict[str, Any]:
    """The seconds after which the other ranks had heard of the kill of `victim`, and what they heard."""
    context = get_context("spawn")
    share = -(-ranks // processes)
    edges = sorted({0, 1, victim, min(victim + 1, ranks), *range(1, ranks, share), ranks})
    pipes: dict[int, Pipe] = {}  # by the first rank of the process
    children = []
    for first, last in pairwise(edges):
        pipes[first], end = context.Pipe()
        child = context.Process(target=run_ranks, args=(range(first, last), ranks, end), daemon=True)
        child.start()
        children.append(child)
    root = pipes[0].recv()
    started = time.monotonic()
    for pipe in pipes.values():
        pipe.send(root)
    assert pipes[0].recv() == "complete"
    connected = time.monotonic() - started
    time.sleep(2.0)  # some messages on what ranks do
    for first, pipe in pipes.items():
        if first != victim:
            pipe.send("listen")
    pipes[victim].send("die")
    killed = pipes[victim].recv()
    heard: dict[int, tuple[float, str]] = {}
    for first, pipe in pipes.items():
        if first != victim:
            heard |= pipe.recv()
    for child in children:
        child.kill()
        child.join()
    seconds = sorted(when - killed for when, _ in heard.values())
    return {
        "seconds_to_connect": round(connected, 2),
        "heard": len(heard),
        "named_the_victim": sum(text.startswith(f"rank {victim} ") for _, text in heard.values()),
        "seconds_to_half": round(median(seconds), 3),
        "seconds_to_last": round(seconds[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--kills", type=int, default=5, help="of each victim")
    parser.add_argument("--processes", type=int, default=4, help="that the ranks are threads of")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for ranks in options.ranks:
        victims = {"rank 0": 0, "the first rank of a node": ranks - PER_NODE, "a leaf": ranks - 1}
        rows[str(ranks)] = {name: [] for name in victims}
        for _ in range(options.kills):
            for name, victim in victims.items():
                rows[str(ranks)][name].append(kill_one(ranks, victim, options.processes))
                print(ranks, name, rows[str(ranks)][name][-1], flush=True)
    write_result("lifelines", {"processes": options.processes, "ranks": rows}, options.output)


if __name__ == "__main__":
    main()
