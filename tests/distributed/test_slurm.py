"""SLURM's variables: any layout of tasks over nodes, tested in one process."""

import pytest

from megatron_zpp.distributed.slurm import (
    RANKS_PORT,
    first_host,
    launcher_variables,
    port_of,
    ranks_port,
    rendezvous_endpoint,
)
from megatron_zpp.distributed.topology import Topology

# Task 5 of 8 on two nodes of four, in the job's second step; the job has a third node.
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "n[001-003]",
    "SLURM_TASKS_PER_NODE": "4(x3)",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[002-003]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
# `srun --pty bash` in an allocation of 8 tasks
SHELL = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
SHELL |= {"SLURM_NODEID": "0", "SLURM_LOCALID": "0"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TASK.items() if name not in names}


def test_every_task_of_a_layout_has_its_rank() -> None:
    """3 nodes of 2: ranks are numbered node by node, and all use the address of the step's first node."""
    step = {**TASK, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2,2(x2)"}
    places = set()
    for rank in range(6):
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
        said = launcher_variables(step | task)
        assert Topology.from_environment(step | task) == Topology(rank, 6, rank % 2, 2)
        places.add((said["MASTER_ADDR"], said["MASTER_PORT"]))
    assert places == {("n002", str(port_of(1234, 1)))}


def test_torchruns_variables_win() -> None:
    torchrun = {
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "there", "MASTER_PORT": "29500"},
    }
    assert Topology.from_environment(TASK | torchrun) == Topology(3, 4, 1, 2)
    assert launcher_variables(TASK | torchrun)["MASTER_ADDR"] == "there"
    assert launcher_variables(TASK | torchrun)["MASTER_PORT"] == "29500"


def test_the_port_of_the_ranks_store_replaces_torchruns() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "41234", RANKS_PORT: ranks_port(TASK)}
    said = launcher_variables(TASK | rank)
    assert said["MASTER_PORT"] == str(port_of(1234, 1, second=True))
    assert said["MASTER_PORT"] != rendezvous_endpoint(TASK)["MASTER_PORT"]


def test_a_meeting_place_that_is_set_is_kept() -> None:
    said = launcher_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("10.0.0.1", "5000")
    assert launcher_variables({**TASK, "MASTER_ADDR": "10.0.0.1"})["MASTER_PORT"] == str(port_of(1234, 1))
    with pytest.raises(ValueError, match="MASTER_PORT 'x'"):
        Topology.from_environment({**TASK, "MASTER_PORT": "x"})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        without("SLURM_STEP_ID"),  # a batch script, which has SLURM_PROCID 0
        without("SLURM_PROCID"),
        {**TASK, "SLURM_STEP_ID": ""},
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's shell as a separate step
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch step
        TASK | SHELL,
    ],
)
def test_what_srun_did_not_start_as_tasks_is_on_its_own(environment: dict[str, str]) -> None:
    assert Topology.from_environment(environment) == Topology(0, 1, 0, 1)


def test_the_jobs_variables_serve_where_the_steps_are_missing() -> None:
    steps = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    old = {**without(*steps), "SLURM_NTASKS": "12"}
    assert Topology.from_environment(old) == Topology(5, 12, 1, 4)
    assert launcher_variables(old)["MASTER_ADDR"] == "n001"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_NODEID", "SLURM_LOCALID"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} \(not set\): .*srun"):
        Topology.from_environment(without(name))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "4(x1),3,1", "all nodes must have the same number of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x3)", "must be the 8 tasks of this step"),
        ("SLURM_STEP_TASKS_PER_NODE", "0(x2)", "must be tasks per node, such as 4"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2", "must be tasks per node, such as 4"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),", "must be tasks per node, such as 4"),
        ("SLURM_STEP_NUM_TASKS", "eight", "must be a whole number"),
        ("SLURM_STEP_ID", "batch", "must be a whole number"),
        ("SLURM_PROCID", "-1", "must be a whole number"),
        ("SLURM_PROCID", "3", "must be 5, as task 1 of node 1.*--distribution=block"),  # cyclic
        ("SLURM_LOCALID", "0", "must be 4, as task 0 of node 1"),
        ("SLURM_STEP_NODELIST", "n[002-003", "must be a host list"),
        ("SLURM_STEP_NODELIST", "n[]", "must be a host list"),
        ("SLURM_STEP_NODELIST", " ", "must be a host list"),
        ("SLURM_HET_SIZE", "2", "heterogeneous jobs number the ranks of each"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^SLURM_\w+ .*{said}"):
        Topology.from_environment({**TASK, name: value})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("localhost", "localhost"),
        ("m2,n[001-003]", "m2"),
        ("n[001-003,7],m2", "n001"),
        ("n[7,9-12]", "n7"),
        ("n[08-11]-ib", "n08-ib"),
        ("rack[2-3]node[05,07]", "rack2node05"),
        ("gpu-a.example.org,gpu-b.example.org", "gpu-a.example.org"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host("SLURM_STEP_NODELIST", hosts) == first


def test_ports_are_apart() -> None:
    """Of jobs that may share a node, and of their restarts; none is privileged or ephemeral."""
    ports = [port_of(job, step) for job in range(70000, 70600) for step in range(30)]
    assert len(set(ports)) == len(ports)
    both = [
        port_of(job, step, second=second)
        for job in range(70000, 70300)
        for step in range(30)
        for second in (False, True)
    ]
    assert len(set(both)) == len(both)
    assert min(ports) > 1024
    assert max(ports) < 29500
