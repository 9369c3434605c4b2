"""Whether a run uses the copy engines: its ranks agree whatever fails on one of them, and none hangs."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.distributed.copy_engine_trial import Steps, choose_copy_engines, decide, descriptor_steps
from megatron_zpp.distributed.symmetric_memory import check_nccl
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from tests.zero.ranks import on_ranks

CPU = torch.device("cpu")
Outcome = tuple[bool | str, list[str], list[str]]  # the decision or the error, what was said, steps taken


def outcome(topology: Topology, steps: Callable[[list[str]], Steps], patience: float = 20.0) -> Outcome:
    said: list[str] = []
    taken: list[str] = []
    try:
        return decide(topology.mesh(), CPU, steps(taken), said.append, patience), said, taken
    except ValueError as error:
        return str(error), said, list(taken)  # `steps` may end once the error is handled


def three_steps(topology: Topology, failing: int | None, taken: list[str]) -> Steps:
    """Of which the second fails on one rank."""

    def second() -> None:
        if topology.rank == failing:
            raise RuntimeError("the driver\nsays no")
        taken.append("second")

    try:
        yield lambda: taken.append("first")
        yield second
        yield lambda: taken.append("third")
    finally:
        taken.append("cleaned")


def wait_in_vain(topology: Topology, taken: list[str]) -> Steps:
    """The last rank fails at once, and the others when they have waited for it."""

    def only() -> None:
        if topology.rank == topology.world_size - 1:
            raise RuntimeError("no handle")
        time.sleep(1.2)
        raise TimeoutError("nobody came")

    yield only


def passed_descriptors(topology: Topology, taken: list[str]) -> Steps:
    pids = [0] * topology.world_size
    dist.all_gather_object(pids, os.getpid())
    yield from descriptor_steps(pids, topology.rank, patience=0.5)


def outcomes(topology: Topology) -> tuple[list[Outcome], float]:
    """Of all scenarios in turn, and the seconds of the last one."""
    results = [outcome(topology, partial(three_steps, topology, failing)) for failing in (None, 1)]
    results.append(outcome(topology, partial(wait_in_vain, topology)))
    passed = partial(passed_descriptors, topology)
    results.append(outcome(topology, passed))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        if topology.rank == 1:  # as in another container: ranks do not find each other's sockets
            tempfile.tempdir = directory
        results.append(outcome(topology, passed))
    return results, time.monotonic() - started


def test_one_rank_that_fails_decides_for_all_and_one_line_says_why() -> None:
    ranks = on_ranks(3, outcomes)
    reason = "RuntimeError: the driver says no [rank 1]"
    line = f"warning: transfers inside nodes use NCCL's kernels, not the copy engines: {reason}"
    waited_for = line.replace("the driver says no [rank 1]", "no handle [rank 2]")
    for rank, (found, seconds) in enumerate(ranks):
        works, falls_back, waited, passes, blocked = found
        whole = ["first", "second", "third", "cleaned"]
        partly = ["first", "cleaned"] if rank == 1 else ["first", "second", "cleaned"]
        assert works == (True, [], whole)
        assert falls_back == (False, [line] if rank == 0 else [], partly)
        assert waited == (False, [waited_for] if rank == 0 else [], [])
        assert passes == (True, [], [])
        assert blocked[0] is False
        assert len(blocked[1]) == (rank == 0)
        assert seconds < 60  # without an end of its patience it would be minutes
    (why,) = ranks[0][0][-1][1]
    assert "cannot pass a file descriptor to process" in why
    assert "[rank 0]" in why


class Killed(BaseException):
    """What ends a rank from outside."""


def waits_for_a_rank_that_failed(topology: Topology) -> Outcome | None:
    """The first rank is in a call that nothing ends but the end of its process."""

    def steps(taken: list[str]) -> Steps:
        def only() -> None:
            if topology.rank == 1:
                raise RuntimeError("no window")
            time.sleep(3)
            raise Killed

        try:
            yield only
        finally:
            taken.append("cleaned")

    try:
        return outcome(topology, steps, patience=0.5)
    except Killed:
        dist.all_reduce(torch.tensor(0))  # so that the test's own collectives match
        return None


def test_a_rank_that_others_wait_for_in_vain_ends_the_run_with_its_reason() -> None:
    """It does not clean up, because that would wait for the others on a GPU."""
    waiting, failed = on_ranks(2, waits_for_a_rank_that_failed)
    assert waiting is None
    reason = "RuntimeError: no window [rank 1]; other ranks still wait for it; set NCCL_CUMEM_ENABLE=0"
    assert failed == (f"trial of copy engines: {reason} on all ranks", [], [])


def test_runs_that_cannot_have_them_do_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for mesh, device in ((Mesh(local_ranks=2), "cpu"), (Mesh(nodes=2, tensor_ranks=2), "cuda")):
        assert not choose_copy_engines(mesh, torch.device(device), None, said.append)
    assert not said
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    with pytest.raises(RuntimeError, match=r"^NCCL_CUMEM_ENABLE is 0$"):
        check_nccl()
