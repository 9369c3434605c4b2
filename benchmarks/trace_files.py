"""Counts the files and functions that the gradients and the weights of a step pass, in three kinds of runs.

python benchmarks/trace_files.py [--list]

One process stands for rank 0 of two nodes of two, with a process group that sends nothing. Gradients: from
the hook that meets one to the reduced shard. Weights: from the optimizer's update to the slot. A file counts
once for each 400 lines that it begins.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.optimizer import DeviceOptimizer
from megatron_zpp.zero.weights import Weights
from tests.zero.zeropp_engines import VOCAB, build

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_zpp"
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ZeRO++": {**QUANTIZED, "zero_hpz_partition_size": "auto"},
    "4 bits with groups": {
        **QUANTIZED,
        "zero_hpz_partition_size": "auto",
        "zero_quantized_weights_format": "delta4",
        "zero_quantized_gradients_format": "rotated4",
        "zero_gradient_partition_size": "auto",
    },
}
Passed = dict[Path, set[str]]  # the functions of each file
Marked = Sequence[tuple[type, str]]  # methods
GRADIENT: Marked = ((Gradients, "gradient_arrived"), (Gradients, "wait"))
WEIGHT: Marked = ((DeviceOptimizer, "update"), (Weights, "updated"))


class Tracer:
    """Notes the package's functions that are called inside of marked ones, on any thread."""

    def __init__(self) -> None:
        self.passed: Passed = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.passed[path.relative_to(PACKAGE)].add(frame.f_code.co_qualname)

    def marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are noted."""

        def run(*arguments: Any, **named: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self)
            try:
                return function(*arguments, **named)
            finally:
                sys.setprofile(before)

        return run


@contextmanager
def tracing(methods: Marked) -> Iterator[Tracer]:
    """Notes what these methods call, and the work that they submit to communication streams."""
    tracer, submit = Tracer(), CommStream.submit

    def marked_submit(stream: CommStream, work: Callable[[], object]) -> Any:
        noted = sys.getprofile() == tracer
        return submit(stream, tracer.marked(work) if noted else work)

    patches = [patch.object(owner, name, tracer.marked(getattr(owner, name))) for owner, name in methods]
    with patch.object(CommStream, "submit", marked_submit):
        for each in patches:
            each.start()
        yield tracer
        for each in patches:
            each.stop()


def step(zero: dict[str, Any], marked: Marked) -> Passed:
    """What a step of two micro-batches passes, after one that made the buffers."""
    engine = build(Topology(0, 4, 0, 2), zero)
    tokens = torch.randint(0, VOCAB, (2, 11))

    def train() -> None:
        for index in range(2):
            engine.accumulate(tokens, index=index, micro_batches=2)
        engine.step(1e-3)

    train()
    with tracing(marked) as tracer:
        train()
    engine.close()
    return tracer.passed


def files(passed: Passed) -> int:
    """How many files of at most 400 lines."""
    return sum(math.ceil(len((PACKAGE / path).read_text().splitlines()) / 400) for path in passed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the files, with their functions")
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    print("| run | files of a gradient | functions | files of a weight | functions |\n|---|---|---|---|---|")
    for kind, zero in KINDS.items():
        found = [step(zero, marked) for marked in (GRADIENT, WEIGHT)]
        cells = [str(cell) for one in found for cell in (files(one), sum(map(len, one.values())))]
        print("|", " | ".join([kind, *cells]), "|")
        for one in found if options.list else ():
            for path, functions in sorted(one.items()):
                print("   ", path, len(functions), *sorted(functions))


if __name__ == "__main__":
    main()
