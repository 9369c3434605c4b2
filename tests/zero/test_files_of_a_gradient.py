"""How many files a gradient passes from its hook to the reduced shard, in all formats and groups."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import megatron_zpp
from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.distributed.topology import Topology
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import ALL, AUTO, FOUR_BITS, batch, build

PACKAGE = Path(megatron_zpp.__file__).parent
LONGEST = 400  # lines of a file that counts as one


def files_of_a_gradient(topology: Topology, zero: dict[str, Any]) -> list[str]:
    """The package's files whose functions are called while three micro-batches' gradients are reduced."""
    engine = build(topology, zero)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(frame.f_code.co_filename)

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            outer = sys.getprofile()
            sys.setprofile(note)
            try:
                return function(*arguments, **named)
            finally:
                sys.setprofile(outer)

        return run

    def submitted_noted(self: CommStream, work: Callable[[], object]) -> Pending:
        return submit(self, noted(work) if sys.getprofile() is note else work)

    def step() -> None:
        for index in range(3):
            engine.accumulate(batch(topology, index), index=index, micro_batches=3)
        gradients.wait()
        engine.step(1e-3)

    gradients, submit = engine._gradients, CommStream.submit
    step()  # what is made once is no part of the way
    for name in ("gradient_arrived", "finish_backward", "wait"):
        setattr(gradients, name, noted(getattr(gradients, name)))
    CommStream.submit = submitted_noted  # type: ignore[method-assign]
    try:
        step()
    finally:
        CommStream.submit = submit  # type: ignore[method-assign]
        engine.close()
    return sorted(files)


@pytest.mark.parametrize(
    ("zero", "most"),
    [({}, 8), (ALL, 9), (FOUR_BITS | AUTO, 10)],
    ids=["plain", "ZeRO++", "4 bits, groups"],
)
def test_a_gradient_passes_few_files(zero: dict[str, Any], most: int) -> None:
    for files in on_ranks(4, files_of_a_gradient, zero, ranks_per_node=2):
        assert 1 < len(files) <= most, files
        assert all(len(Path(file).read_text().splitlines()) <= LONGEST for file in files)
