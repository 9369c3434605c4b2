"""--buddy-snapshots: runs that lose processes and nodes resume from memory, where there is no checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults.network import Link
from megatron_zpp.memory_snapshots.copies import MemoryCopies, SnapshotName
from tests.support import ROOT, Run, environment, free_port, holding, nightly, wait_until
from tests.train.conftest import BYTES, TINY
from tests.train.test_faults import in_micro_batch, weights

EVERY, END = 5, 20
LENGTH = f"--train-iters {END} --global-batch-size 8 --num-workers 0 --log-interval 5 --eval-iters 0".split()
MODEL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --zero-stage 3".split()
SNAPSHOTS = f"--buddy-snapshots {EVERY} --heartbeat-timeout 20".split()
Change = Callable[[], object]


class Nodes:
    """A run on nodes of `local` ranks each, which have directories in memory of their own."""

    def __init__(self, memory: Path, directory: Path, flags: list[str], local: int = 1) -> None:
        self.local = local
        self._memory, self._directory, self.save = memory, directory, directory / "checkpoints"
        self.argv = [*flags, *LENGTH, *MODEL, "--save", str(self.save), "--load", str(self.save)]
        self._starts = 0

    def start(self, *flags: str, ranks: int = 2, changes: dict[int, Change] | None = None) -> Run:
        """Start all ranks; `changes` are done to the program on some of them."""
        self._starts += 1
        run = Run(self._directory / f"log_{self._starts}", ranks)
        for rank in range(ranks):
            memory = self.of(rank // self.local)
            memory.mkdir(exist_ok=True)
            argv = [*self.argv, *SNAPSHOTS, "--buddy-directory", str(memory), *flags]
            run.start(rank, *argv, change=(changes or {}).get(rank), **place(rank, self.local))
        return run

    def of(self, node: int) -> Path:
        """The memory of a node."""
        return self._memory / str(node)

    def lose(self, node: int) -> None:
        """A spare takes the place of a node: its memory is empty."""
        shutil.rmtree(self.of(node))

    def files(self, pattern: str) -> list[Path]:
        """The files that nodes have of snapshots, such as "iter_*/rank_00000.json"."""
        return sorted(self._memory.glob(f"*/*/*/holder_*/{pattern}"))

    def crash(self, at: int, after: int, *flags: str, ranks: int = 2, snapshots: int = 1) -> None:
        """Kill all ranks in step `at`, when as many snapshots of iteration `after` have all their copies."""
        copies = ranks * (1 if ranks == self.local else 2)
        pattern = f"iter_{after:07d}-*/rank_*.json"
        die = partial(die_when_whole, self.files, pattern, copies, snapshots)
        with self.start(*flags, ranks=ranks, changes={1: partial(in_micro_batch, at, die)}) as run:
            run.processes[1].join(120)
            assert run.processes[1].exitcode == -signal.SIGKILL, run.err(1)
        assert not list(self.save.glob("iter_*")) or flags  # nothing to resume from but memory

    def finish(self, *flags: str, ranks: int = 2) -> str:
        """Start all ranks, and run to the end; returns the log."""
        with self.start(*flags, ranks=ranks) as run:
            assert set(run.statuses().values()) == {0}, run.err(0) + run.out(0)
            assert self.files("*") == []  # nothing is left in memory
            return run.out(0)


def place(rank: int, local: int) -> dict[str, str]:
    """The variables of a launcher for nodes of `local` ranks."""
    return {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}


def die_when_whole(files: Callable[[str], list[Path]], pattern: str, copies: int, snapshots: int) -> None:
    """Kill this process once there are so many snapshots of so many copies."""

    def whole() -> int:
        counts = Counter(path.parent.name for path in files(pattern))
        return sum(count >= copies for count in counts.values())

    wait_until(lambda: whole() >= snapshots)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def nodes(flags: list[str], tmp_path: Path) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Nodes(Path(memory), tmp_path, flags)


def undisturbed(
    corpus: str, directory: Path, *flags: str, ranks: int = 2, local: int = 1
) -> dict[str, bytes]:
    """The weights that a run ends with which takes no memory snapshots and which nobody disturbs."""
    save = directory / "checkpoints"
    argv = ["--data-path", corpus, "--split", "80,10,10", *BYTES, *TINY, *LENGTH, *MODEL, *flags]
    with Run(directory / "log", ranks) as run:
        for rank in range(ranks):
            run.start(rank, *argv, "--save", str(save), **place(rank, local))
        assert set(run.statuses().values()) == {0}, run.err(0)
    return weights(save, END)


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of an undisturbed run on two nodes of one rank each."""
    return undisturbed(corpus, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("lost", [1, *(nightly(lost) for lost in (None, 0))])
def test_a_killed_run_goes_on_from_memory(nodes: Nodes, whole: dict[str, bytes], lost: int | None) -> None:
    """Whether all hosts are the same ones or a spare has taken the place of one. There is no checkpoint."""
    nodes.crash(13, 10)
    if lost is not None:
        nodes.lose(lost)
    log = nodes.finish()
    assert "loaded iteration 10 in memory; resuming at iteration 10, 80 samples" in log
    assert weights(nodes.save, END) == whole


ZEROPP = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size auto".split()
BLOCKS = ["--zero-table-rows", "100"]  # of 384 rows


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([*BLOCKS, *ZEROPP, "--zero-quantized-weights-format", "delta4"], id="row blocks"),
        pytest.param([*BLOCKS, "--zero-stage", "2", "--zero-unit", "sublayer"], id="row blocks, stage 2"),
        pytest.param([*BLOCKS, "--zero-stage", "0"], id="row blocks, stage 0"),
        pytest.param([*ZEROPP, "--zero-quantized-weights-format", "delta4", "--bf16"], id="ZeRO++"),
        pytest.param(["--tensor-model-parallel-size", "2"], id="tensor ranks"),
        pytest.param(["--zero-stage", "0", "--fp16"], id="stage 0"),
    ],
)
def test_nodes_of_two_ranks_lose_one_node(
    nodes: Nodes, corpus: str, tmp_path: Path, settings: list[str]
) -> None:
    """All states are exact: references, loss scale, formats, parts of tensor ranks."""
    nodes.local = 2
    tensor_ranks = 2 if "--tensor-model-parallel-size" in settings else 1
    settings = ["--micro-batch-size", str(2 * tensor_ranks), *settings]  # one for each step
    whole = undisturbed(corpus, tmp_path / "whole", *settings, ranks=4, local=2)
    nodes.crash(13, 10, *settings, ranks=4)
    nodes.lose(1)
    assert "loaded iteration 10 in memory" in nodes.finish(*settings, ranks=4)
    assert weights(nodes.save, END) == whole


def on_linked_node(link: Link, node: int) -> None:
    """Move this rank to a node; the name of rank 0's host means a loopback address there, as on Debian."""
    link.enter(node)
    os.environ.update(MASTER_ADDR=link.address(0) if node else "127.0.1.1", GLOO_SOCKET_IFNAME=link.INTERFACE)


def test_a_host_whose_own_name_is_loopback_there_is_reached(nodes: Nodes, link: Link) -> None:
    changes = {node: partial(on_linked_node, link, node) for node in (0, 1)}
    with nodes.start(changes=changes) as run:
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        assert "iteration 0 is in the memory of two nodes" in run.out(0)
        assert "could not be copied" not in run.out(0)


def test_one_node_keeps_its_own_copies(nodes: Nodes, whole: dict[str, bytes]) -> None:
    """Which outlive its processes, though not their host. The weights do not depend on the nodes."""
    nodes.local = 2
    nodes.crash(13, 10)
    assert len(nodes.files("iter_0000010-*/rank_*.json")) == 2
    log = nodes.finish()
    assert "loaded iteration 10 in memory" in log
    assert "iteration 10 is in the memory of this node alone" in log
    assert weights(nodes.save, END) == whole


def test_a_start_keeps_what_its_ranks_write_already(tmp_path: Path) -> None:
    """Ranks need not wait for each other between what they load and their first snapshot."""
    old, new = "0" * 8, "1" * 8
    loaded, first = SnapshotName(10, old), SnapshotName(10, new)
    for name in (SnapshotName(5, old), loaded, SnapshotName(15, old), first):
        (tmp_path / "holder_0" / str(name)).mkdir(parents=True)
    MemoryCopies(tmp_path, 0).remove_earlier_starts(new, kept=loaded)
    assert {path.name for path in (tmp_path / "holder_0").iterdir()} == {str(loaded), str(first)}


def test_a_node_may_be_lost_again_before_the_next_snapshot(nodes: Nodes, whole: dict[str, bytes]) -> None:
    """What a spare fetched, and what it holds for others, is complete before its first step."""
    nodes.crash(13, 10)
    nodes.lose(1)
    nodes.crash(2, 10)  # of the second start
    nodes.lose(0)
    assert "loaded iteration 10 in memory" in nodes.finish()
    assert weights(nodes.save, END) == whole


def test_snapshots_of_two_starts_are_not_mixed(nodes: Nodes, whole: dict[str, bytes]) -> None:
    """Both are of the same iteration, and the one that is tried first is damaged."""
    nodes.crash(13, 10)
    first = nodes.files("iter_0000010-*")
    kept = [path.with_name(f"kept_{path.name}") for path in first]
    for path, copy in zip(first, kept, strict=True):
        shutil.copytree(path, copy)
    nodes.crash(2, 10, snapshots=2)  # of the second start, which removes those of the first one
    for path, copy in zip(first, kept, strict=True):
        shutil.rmtree(path, ignore_errors=True)
        copy.rename(path)
    names = {path.name for path in nodes.files("iter_0000010-*")}
    assert len(names) == 2
    for path in nodes.files(f"{max(names)}/rank_00000.safetensors"):
        flip(path)
    log = nodes.finish()
    assert log.count("WARNING: iteration 10 in memory is skipped: ") == 1
    assert "loaded iteration 10 in memory" in log
    assert weights(nodes.save, END) == whole


SLOW, SLOW_PIECES = 7, 14  # seconds that a slow file takes, in so many pieces


def killed_in_snapshot(iteration: int) -> None:
    """This rank is killed when it has sent the shards of a snapshot, but not their description."""
    from megatron_zpp.memory_snapshots import buddy_memory

    put = buddy_memory.put_file

    def killing(peer: object, source: Path, name: str) -> None:
        if f"iter_{iteration:07d}" in name and name.endswith(".json"):
            os.kill(os.getpid(), signal.SIGKILL)
        put(peer, source, name)

    buddy_memory.put_file = killing


def test_a_kill_during_a_snapshot_leaves_the_one_before(nodes: Nodes, whole: dict[str, bytes]) -> None:
    with nodes.start(changes={1: partial(killed_in_snapshot, 10)}) as run:
        run.processes[1].join(120)
    nodes.lose(1)  # otherwise its own copy is whole
    log = nodes.finish()
    assert "iteration 10 in memory lacks the copies of rank 1 of 2" in log
    assert "loaded iteration 5 in memory" in log
    assert weights(nodes.save, END) == whole


def flip(path: Path, position: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["rank_00001.safetensors", nightly("rank_00001.json")])
def test_a_damaged_snapshot_is_named_and_skipped(nodes: Nodes, whole: dict[str, bytes], kind: str) -> None:
    nodes.crash(13, 10)
    for path in nodes.files(f"iter_0000010-*/{kind}"):
        flip(path)
    log = nodes.finish()
    assert "WARNING: " in log
    assert f"{kind}: damaged" in log
    assert "loaded iteration 5 in memory" in log
    assert weights(nodes.save, END) == whole


def test_a_checkpoint_replaces_snapshots_that_are_damaged_or_older(
    nodes: Nodes, whole: dict[str, bytes]
) -> None:
    nodes.crash(13, 10, "--save-interval", "7")
    for path in nodes.files("iter_*/rank_00000.safetensors"):
        flip(path)
    log = nodes.finish()
    assert log.count("in memory is skipped: ") == 1  # iteration 5 is older than the checkpoint
    assert f"loaded {nodes.save / 'iter_0000007'}; resuming at iteration 7" in log
    assert weights(nodes.save, END) == whole


@pytest.mark.nightly
def test_without_a_whole_snapshot_or_a_checkpoint_the_start_after_next_begins_anew(
    nodes: Nodes, whole: dict[str, bytes]
) -> None:
    """The first start may have changed weights already when it finds the damage."""
    nodes.crash(13, 10)
    for path in nodes.files("iter_*/rank_00000.safetensors"):
        flip(path)
    with nodes.start() as run:
        assert set(run.statuses().values()) == {1}
        (line,) = run.errors()
    assert "--buddy-snapshots 5: iteration 10 in memory is not whole: " in line
    assert "holds no checkpoint" in line
    assert "starting from initial weights" in nodes.finish()
    assert weights(nodes.save, END) == whole


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        pytest.param(["--zero-stage", "0"], ["--zero-stage", "0"], 1, id="stage 0"),
        pytest.param([], [], 1, id="stage 3"),
        pytest.param(BLOCKS, BLOCKS, 1, id="row blocks"),
        pytest.param(BLOCKS, ["--zero-table-rows", "128"], 2, id="other row blocks"),
        pytest.param([], BLOCKS, 2, id="row blocks of whole tables"),
    ],
)
def test_a_restart_with_other_shards_loads_the_memory_of_all(
    nodes: Nodes, before: list[str], after: list[str], ranks: int, tmp_path: Path
) -> None:
    """As it loads a checkpoint of the same iteration, with what one node held for the other."""
    nodes.crash(13, 10, *before, "--save-interval", "10")
    shutil.copytree(nodes.save, tmp_path / "copy")
    nodes.lose(1)
    assert "loaded iteration 10 in memory" in nodes.finish(*after, ranks=ranks)
    resumed = weights(nodes.save, END)
    shutil.rmtree(nodes.save)
    shutil.copytree(tmp_path / "copy", nodes.save)
    assert f"loaded {nodes.save}" in nodes.finish(*after, ranks=ranks)
    assert weights(nodes.save, END) == resumed


def test_a_run_that_begins_anew_does_not_find_the_memory_of_the_one_before(nodes: Nodes) -> None:
    """It has the same command line, and an emptied --save. A damaged name of the memory is refused."""
    nodes.crash(13, 10)
    flip(nodes.save / "memory_snapshots.txt")
    with nodes.start() as run:
        assert run.statuses() == {0: 1, 1: 1}
        (line,) = run.errors()
    assert f"--save {nodes.save}: memory_snapshots.txt there says " in line
    assert "is damaged; remove it to resume without them" in line
    shutil.rmtree(nodes.save)
    with nodes.start() as run:
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        assert "starting from initial weights" in run.out(0)


def test_what_was_loaded_from_memory_is_saved(nodes: Nodes) -> None:
    """A run that has nothing left to do but that."""
    nodes.crash(13, 10)
    log = nodes.finish("--train-iters", "10")
    assert "the run is complete: iteration 10 of 10" in log
    assert len(weights(nodes.save, 10)) == 2


def unreachable_buddy() -> None:
    """Nothing can be sent from this rank after the first snapshot."""
    from megatron_zpp.memory_snapshots import buddy_memory

    put, sent = buddy_memory.put_file, []

    def failing(peer: object, source: Path, name: str) -> None:
        sent.append(name)
        if len(sent) > 2:
            raise OSError("no route to the buddy")
        put(peer, source, name)

    buddy_memory.put_file = failing


def test_a_snapshot_that_fails_is_a_warning(nodes: Nodes, whole: dict[str, bytes]) -> None:
    with nodes.start(changes={1: unreachable_buddy}) as run:
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        log = run.out(0)
    assert "WARNING: iteration 5 could not be copied to memory: rank 1 on " in log
    assert "no route to the buddy; iteration 0 is the newest there; training continues" in log
    assert weights(nodes.save, END) == whole


def little_room() -> None:
    from megatron_zpp.memory_snapshots import buddy_memory

    buddy_memory.room_for = lambda root, run: 1000


def test_too_little_room_is_refused_on_all_ranks(nodes: Nodes) -> None:
    with nodes.start(changes={1: little_room}) as run:
        assert run.statuses() == {0: 1, 1: 1}
        (line,) = run.errors()
    assert ": --buddy-snapshots needs 0.0" in line
    assert "rank 1]" in line
    assert list(nodes.save.glob("*")) == []


@pytest.mark.nightly
def test_torchrun_restarts_a_run_from_memory(nodes: Nodes, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Two nodes with a torchrun each; one rank is killed, and torchrun ends and restarts all."""
    port, hold = str(free_port()), tmp_path / "hold"
    place = environment(**holding(hold, after=13, path=str(ROOT)))
    logs = [tmp_path / "log_0", tmp_path / "log_1"]
    jobs = []
    for node in range(2):
        nodes.of(node).mkdir()
        argv = f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --max-restarts 2 --master-addr 127.0.0.1 "
        argv += f"--master-port {port} pretrain_gpt.py --buddy-directory {nodes.of(node)}"
        command = [sys.executable, "-m", "torch.distributed.run", *argv.split(), *nodes.argv, *SNAPSHOTS]
        with logs[node].open("w") as log:
            jobs.append(subprocess.Popen(command, cwd=ROOT, env=place, stdout=log, stderr=log))
    try:
        wait_until(lambda: len(nodes.files("iter_0000010-*/rank_*.json")) == 4)
        (rank,) = Path(f"/proc/{jobs[1].pid}/task/{jobs[1].pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
        hold.unlink()  # the restarted ranks go on
        assert [job.wait(240) for job in jobs] == [0, 0], logs[0].read_text()
    finally:
        for job in jobs:
            job.kill()
    assert "loaded iteration 10 in memory; resuming at iteration 10" in logs[0].read_text()
    assert weights(nodes.save, END) == whole
