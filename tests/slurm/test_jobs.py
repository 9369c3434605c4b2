"""The scripts of launch/slurm on a real SLURM: stopped, killed, requeued, and finished with the same weights.

They run unchanged but for their resources. Two nodes are one machine; ranks talk gloo on CPUs.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Job, why_not
from tests.support import holding, nightly, trained

MODEL = (
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2 --hidden-size 64"
    " --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 --lr 3e-3 --log-interval 10 --eval-iters 0"
    " --num-workers 0"
).split()
LENGTH = "--global-batch-size 8 --train-iters 80 --save-interval 10".split()
TWO_NODES = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --oversubscribe"
ONE_RANK = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=0 --oversubscribe"
SAVED = ("--save", "saved", "--load=saved")
SECOND_RANK = {"pretrain_gpt.sbatch": "SLURM_PROCID=1", "pretrain_gpt_torchrun.sbatch": "RANK=1"}
ENDLESS = ("--train-iters", "1000000")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that reaches its time limit of a minute, and is signalled before."""
    directory = tmp_path_factory.mktemp("limited")
    site = directory / "site.sh"  # what a cluster's file for containers looks like
    site.write_text(
        "srun_arguments=(--job-name 'a step')\ncontainer=(nice -n 19)\nexport ZPP_FROM_SITE='a b'\n"
    )
    resources = f"{ONE_RANK} --time=1 --signal=B:USR1@60"
    variables = {"ZPP_ENVIRONMENT": str(site), "MAX_REQUEUES": "1", "PYTHON": sys.executable}
    flags = (*MODEL, *ENDLESS, *SAVED, "--log-interval", "500")
    return Job(cluster, directory, "pretrain_gpt.sbatch", resources, *flags, **variables)


def submit(
    cluster: Cluster, directory: Path, script: str, resources: str, *flags: str, **variables: str
) -> Job:
    return Job(cluster, directory, script, resources, *flags, PYTHON=sys.executable, **variables)


def driven(cluster: Cluster, directory: Path, script: str) -> Job:
    """A job of a launcher: a rank is killed, and the job is signalled after it has resumed.

    Neither is late: each start waits for it after three lines.
    """
    hold = directory / "hold"
    variables = {"RANKS_PER_NODE": "1", "MAX_RESTARTS": "1", **holding(hold, after=33)}
    job = submit(cluster, directory, script, TWO_NODES, *MODEL, *LENGTH, *SAVED, **variables)
    job.wait_for("iteration       30/")
    os.kill(job.rank(SECOND_RANK[script]), signal.SIGKILL)
    job.wait_for("iteration       50/")
    job.signal_held(hold, SECOND_RANK[script])
    return job


def weights(directory: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint, as bytes."""
    return {file.name: file.read_bytes() for file in (directory / "iter_0000080").glob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The final weights of an undisturbed run of two ranks."""
    save = tmp_path_factory.mktemp("whole")
    trained(*MODEL, *LENGTH, "--save", str(save), processes=2)
    return weights(save)


@pytest.mark.nightly
def test_a_bad_command_line_is_final(cluster: Cluster, tmp_path: Path) -> None:
    flags = (*MODEL, *SAVED, "--train-itters", "5")
    job = submit(cluster, tmp_path, "pretrain_gpt.sbatch", ONE_RANK, *flags)
    ended, log = job.wait(), job.log()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), log
    assert log.count("did you mean --train-iters?") == 1
    assert "launch/slurm" not in log


@pytest.mark.nightly
def test_a_cancelled_job_saves_and_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """With ZeRO++'s flags; flags after the script override those in it."""
    small = (*MODEL, *SAVED, *ENDLESS, "--zero-hpz-partition-size", "1")
    job = submit(cluster, tmp_path, "zeropp_18b.sbatch", ONE_RANK, *small)
    job.wait_for("iteration       10/")
    job.signal()
    ended, log = job.wait(), job.log()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), log
    assert "ZeRO stage 3 + qwZ int8 + qgZ int4" in log
    assert ": SIGTERM\n" in log
    assert "saved saved/iter_" in log


@pytest.mark.nightly
def test_a_sweep_requeues_one_of_its_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """The last task, whose id is that of the whole array."""
    (tmp_path / "points.txt").write_text(
        "--lr 1e-3 --train-iters 3\n--lr 2e-3  --lr-decay-style constant --train-iters 60\n"
    )
    flags = ("points.txt", "runs", *MODEL, "--seed", "7")
    hold = tmp_path / "hold"
    resources = f"--array=1-2 {ONE_RANK}"
    job = submit(cluster, tmp_path, "sweep.sbatch", resources, *flags, **holding(hold, after=25))
    job.wait_for("iteration       10/", task="2")
    job.signal_held(hold, "SLURM_STEP_ID=0", task="2")
    first, second = job.wait("1"), job.wait("2")
    assert (first["JobState"], first["Restarts"]) == ("COMPLETED", "0"), job.log("1")
    assert (second["JobState"], second["Restarts"]) == ("COMPLETED", "1"), job.log("2")
    assert second["JobId"] == second["ArrayJobId"]
    assert "learning rate: 2.000000E-03" in job.log("2")
    for task, iterations in (("1", 3), ("2", 60)):
        tracker = tmp_path / "runs" / task / "latest_checkpointed_iteration.txt"
        assert tracker.read_text().strip() == str(iterations)
    assert (tmp_path / "runs" / "2" / "metrics.jsonl").read_text().count("lm_loss") >= 6


@pytest.mark.parametrize("script", ["pretrain_gpt.sbatch", nightly("pretrain_gpt_torchrun.sbatch")])
def test_a_run_that_is_killed_and_requeued_ends_with_the_same_weights(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], script: str
) -> None:
    job = driven(cluster, tmp_path_factory.mktemp("submitted here"), script)
    ended, log = job.wait(), job.log()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert f"launch/slurm: job {job.id}: a rank ended with SIGKILL; restart 1 of 1" in log
    assert log.count("exiting at iteration") == log.count(": SIGUSR1\n") == 1, log
    assert log.count("requeues itself: requeue 1 of 100") == 1
    assert log.count("resuming at iteration") == 2
    assert weights(job.directory / "saved") == whole


@pytest.mark.nightly
def test_a_time_limit_requeues_as_often_as_allowed(limited: Job) -> None:
    """The job gets the signal of two time limits in a row; the second one is final."""
    ended, log = limited.wait(), limited.log()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "1"), log
    assert log.count(": SIGUSR1\n") == 2
    assert log.count("requeues itself: requeue 1 of 1") == log.count("resuming at iteration") == 1
    assert "requeued 1 times, which is MAX_REQUEUES; submit it again to resume" in log
