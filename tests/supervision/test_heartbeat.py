"""Who ended a run of real ranks, of which one is killed, stuck or suspended."""

import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.lifelines import Lifelines
from megatron_zpp.distributed.process_group import process_group
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision import heartbeat as module
from megatron_zpp.supervision.errors import one_line_errors
from megatron_zpp.supervision.heartbeat import heartbeat
from megatron_zpp.supervision.once_per_node import say_here
from megatron_zpp.supervision.process import Process
from megatron_zpp.supervision.signals import stop_signals
from tests.forkserver import CONTEXT
from tests.support import free_port, wait_until

TIMEOUT = 12.0  # who is well is never that late, however busy the machine; to look up a host name can take 5
PATIENCE = 120  # seconds; collectives would wait for ten minutes


def rank_main(
    directory: str,
    rank: int,
    world: int,
    port: int,
    ending: str,
    timeout: float,
    kept_elsewhere: bool,
) -> None:
    """Steps of one small collective each, until a file of the test's says otherwise."""
    place = Path(directory)
    torch.set_num_threads(1)
    with open(place / f"{rank}.err", "w") as err:
        os.dup2(err.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if kept_elsewhere:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    topology = Topology(rank, world, rank, world)
    config = DistributedConfig(heartbeat_timeout=timeout)
    meeting = Process(prog="test", topology=topology, per_node=say_here).connect(config)
    with (
        stop_signals("signals", topology, say_here, saves=True) as signals,
        one_line_errors("test", topology),
        heartbeat(
            meeting.store,
            topology,
            timeout,
            "test",
            signals.told_to_stop,
            meeting.lifelines,
        ) as activity,
        process_group(config, topology, torch.device("cpu"), meeting),
    ):
        for step in range(10**9):
            activity.now(f"step {step}")
            total = torch.tensor([float((place / "end").exists())])
            if world > 1:
                dist.all_reduce(total)
            (place / f"{rank}.steps").write_text(str(step))
            if total.item():
                break
            activity.now("thinking")
            time.sleep(1000 if (place / f"stick{rank}").exists() else 0.01)
            if rank == 0 and signals.told_to_stop() and ending == "leave after a long step":
                time.sleep(LONG_STEP)
                (place / "end").touch()
        if ending == "raise" and rank == world - 1:
            raise ValueError("token 5 is outside")
        activity.now("wait", patient=True)
        time.sleep(0.5 * rank if ending == "leave one after another" else 0.0)
        if ending == "raise":
            dist.barrier()


@dataclass(frozen=True)
class Scenario:
    """The fate of a run: a signal to the victim, a stuck victim, or all ranks reach the end.

    A signal without a victim is for all, who are continued after more than the time limit. `told`: as when
    torchrun finds that a rank has died, the others get SIGTERM, and `kept_elsewhere`: it keeps the store.
    `twice`: the last rank is started once more, as if the same command had been given twice.
    """

    world: int
    victim: int | None = None
    fault: signal.Signals | None = None
    ending: str = "leave"
    told: bool = False
    kept_elsewhere: bool = False
    twice: bool = False


STUCK = [Scenario(1, 0), Scenario(3, 2)]
# A rank that is stopped keeps the others waiting in a collective, as NCCL does for one that is dead.
SILENT = Scenario(3, 1, signal.SIGSTOP)
TOLD = [Scenario(3, victim, signal.SIGSTOP, told=True, kept_elsewhere=victim == 0) for victim in (0, 1)]
LONG_STEP = 5.0  # seconds, and more than a silence that is noticed
ALIVE = Scenario(3, ending="leave after a long step", told=True)
RAISES = Scenario(3, ending="raise")
SUSPENDED = Scenario(3, fault=signal.SIGSTOP)
TWICE = Scenario(3, twice=True)
ORDERLY = Scenario(3, ending="leave one after another")


@dataclass(frozen=True)
class End:
    """The exit status and output of each rank."""

    statuses: list[int | None]
    said: list[list[str]]

    def line(self, rank: int) -> str:
        """The last lines of a rank; torch's warnings of a lost store may precede them."""
        said = self.said[rank]
        assert sum(line.startswith("test") for line in said) == 1, said
        return said[-1]


def wait_for_steps(directory: Path, world: int, steps: int) -> None:
    """Wait until every rank has made more steps."""
    for path in (directory / f"{rank}.steps" for rank in range(world)):
        wait_until(lambda path=path: path.exists() and int(path.read_text() or 0) > steps, PATIENCE)


def suspend(process_ids: Sequence[int], seconds: float) -> None:
    for process_id in process_ids:
        os.kill(process_id, signal.SIGSTOP)
    time.sleep(seconds)
    for process_id in process_ids:
        os.kill(process_id, signal.SIGCONT)


def play(directory: Path, scenario: Scenario) -> End:
    """Processes that send heartbeat messages from their first step, forked from a server with torch."""
    port, world = free_port(), scenario.world
    # Only who is silent or stuck has to be waited for; nobody else is, on a machine that is busy.
    timeout = 20 * TIMEOUT if scenario in (RAISES, ALIVE, TWICE, *TOLD, ORDERLY) else TIMEOUT
    keeper = (
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        if scenario.kept_elsewhere
        else None
    )
    given = (world, port, scenario.ending, timeout, scenario.kept_elsewhere)
    processes = [
        CONTEXT.Process(target=rank_main, args=(str(directory), rank, *given)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        wait_for_steps(directory, world, 100)
        if not scenario.told:
            time.sleep(3)  # some heartbeats
        survivors = set(range(world))
        if scenario == SUSPENDED:
            suspend([process.pid for process in processes], timeout + 2)
            wait_for_steps(directory, world, int((directory / "0.steps").read_text() or 0) + 200)
            (directory / "end").touch()
        elif scenario.twice:
            (directory / "again").mkdir()
            another = CONTEXT.Process(target=rank_main, args=(str(directory / "again"), world - 1, *given))
            another.start()
            another.join(PATIENCE)
            assert another.exitcode == 1
            assert "is taken by process" in (directory / "again" / f"{world - 1}.err").read_text()
            wait_for_steps(directory, world, int((directory / "0.steps").read_text() or 0) + 200)
            time.sleep(3)  # some heartbeats
            (directory / "end").touch()
        elif scenario.fault:
            os.kill(processes[scenario.victim].pid, scenario.fault)
            survivors.remove(scenario.victim)
        elif scenario != ALIVE:
            (directory / ("end" if scenario.victim is None else f"stick{scenario.victim}")).touch()
        for rank in survivors if scenario.told else ():
            os.kill(processes[rank].pid, signal.SIGTERM)
        for rank in survivors:
            processes[rank].join(PATIENCE)
        said = [(directory / f"{rank}.err").read_text().splitlines() for rank in range(world)]
        return End([process.exitcode for process in processes], said)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del keeper


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Future[End]]]:
    """Run several at a time, because they mostly wait."""
    scenarios = [SILENT, *STUCK, *TOLD, ALIVE, RAISES, ORDERLY]
    with ThreadPoolExecutor(6) as pool:
        yield {each: pool.submit(play, tmp_path_factory.mktemp("ranks"), each) for each in scenarios}


Played = dict[Scenario, Future[End]]


@pytest.mark.parametrize("scenario", [SILENT, *TOLD], ids=lambda each: f"{each.victim}-{each.told}")
def test_survivors_name_a_rank_that_is_silent(played: Played, scenario: Scenario) -> None:
    """Long before collectives time out; before the heartbeat's own too where they are told to stop."""
    end, victim, host = played[scenario].result(), scenario.victim, re.escape(platform.node())
    for rank in {0, 1, 2} - {victim}:
        assert end.statuses[rank] == 1
        who = rf"test \[{host} rank {rank}\]: error: rank {victim} \[{host}\]"
        words = r"has been silent for (\d+) s; last seen: (step |thinking)"
        silent = re.match(f"{who} {words}", end.line(rank))
        assert silent, end.line(rank)
        assert int(silent[1]) < 3 * TIMEOUT, end.line(rank)  # 4 or 5 where told, whose heartbeat's is 240


def test_ranks_that_are_told_to_stop_may_finish_a_long_step(played: Played) -> None:
    end = played[ALIVE].result()
    assert end.statuses == [0] * 3, end
    assert all(
        said == [f"signals [{platform.node()}]: got SIGTERM: stopping after this step and saving"]
        for said in end.said
    ), end


@pytest.mark.parametrize("scenario", STUCK, ids=lambda stuck: f"{stuck.world}-{stuck.victim}")
def test_a_rank_that_is_stuck_ends_the_run(played: Played, scenario: Scenario) -> None:
    end, host = played[scenario].result(), re.escape(platform.node())
    for rank, status in enumerate(end.statuses):
        assert status == 1
        line = end.line(rank)
        found = re.search(
            rf"error: rank {scenario.victim} \[{host}\] stuck for (\d+) s; last seen: thinking", line
        )
        assert found, line
        assert TIMEOUT <= int(found[1]) < PATIENCE, line


def test_a_rank_reports_its_error_to_the_others(played: Played) -> None:
    end = played[RAISES].result()
    for rank, status in enumerate(end.statuses):
        assert status == 1
        failed = "" if rank == 2 else f"rank 2 [{platform.node()}] failed: "
        assert end.line(rank).endswith(f"error: {failed}token 5 is outside")


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", [SUSPENDED, TWICE], ids=["suspended", "twice"])
def test_a_suspended_job_and_one_with_a_rank_that_is_started_twice_continue(
    tmp_path: Path, scenario: Scenario
) -> None:
    assert play(tmp_path, scenario) == End([0] * 3, [[]] * 3)


def test_an_orderly_end_is_silent(played: Played) -> None:
    """Although ranks end at different times, and the first one hosts the store."""
    assert played[ORDERLY].result() == End([0] * 3, [[]] * 3)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process, which does not end, says as it should."""
    said: list[str] = []

    def end(prog: str, topology: Topology, problem: str) -> None:
        said.append(f"error: {problem}")
        raise SystemExit  # it ends the thread: nothing follows the end of a process

    hook = threading.excepthook  # pytest's, which takes no thread's SystemExit
    monkeypatch.setattr(
        threading, "excepthook", lambda error: None if error.exc_type is SystemExit else hook(error)
    )
    monkeypatch.setattr(module, "end_at_once", end)
    return said


def two_ranks() -> tuple[Lifelines, Lifelines]:
    """Connected lifelines of two ranks."""
    ranks = [Lifelines(Topology(rank, 2, rank, 2), lambda text: None) for rank in range(2)]
    port = ranks[0].listen()
    for one in ranks:
        one.start(port, "127.0.0.1", "token")
    wait_until(lambda: all(one.complete for one in ranks))
    return ranks[0], ranks[1]


def test_a_rank_0_that_stops_just_before_the_heartbeats_is_found(ends: list[str]) -> None:
    first, second = two_ranks()
    with heartbeat(dist.HashStore(), Topology(1, 2, 1, 2), 1.0, "test", lifelines=second):
        wait_until(lambda: ends)
    assert re.fullmatch(r"error: rank 0 has been silent for \d+ s; last seen: starting", ends[0])
    first.leave()


def test_a_run_ends_with_the_launcher_that_keeps_its_store(ends: list[str]) -> None:
    kept = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    store = dist.TCPStore("127.0.0.1", kept[0].port, wait_for_workers=False)
    first, second = two_ranks()
    mark = {"doing": "step 1", "marks": 1, "seconds": 0.0, "patient": False}
    second.beat({"rank": 1, "host": "here", "count": 1, "left": True, **mark})
    with heartbeat(store, Topology(0, 2, 0, 2), 6.0, "test", lifelines=first):
        time.sleep(1)  # to connect
        kept.clear()
        wait_until(lambda: ends)
    assert ends == ["error: the run's store is gone: the launcher that keeps it has ended"]
    second.leave()


def test_rank_0_does_not_end_well_beside_a_rank_that_fails(ends: list[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = two_ranks()
    mark = {"doing": "saving", "marks": 1, "seconds": 0.0, "patient": False}
    second.beat({"rank": 1, "host": "here", "count": 1, "left": False, "failed": "no space", **mark})

    def work() -> None:
        with heartbeat(store, Topology(0, 2, 0, 2), 6.0, "test", lifelines=first):
            wait_until(lambda: 1 in first.beats)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: ends)
    assert ends == ["error: rank 1 [here] failed: no space"]
    assert thread.is_alive()
    first.beats[1]["left"] = True  # or this process would wait
    thread.join()
    second.leave()
