"""torchrun in a SLURM step: what it is told, and which status it leaves with. Whole jobs: tests/slurm."""

import signal

import pytest

from megatron_zpp.commands.torchrun import rendezvous_flags, status_of
from tests.support import run

NODE = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n4",
}


def test_all_nodes_get_one_address_and_the_first_node_hosts_it() -> None:
    first, second = (
        rendezvous_flags({**NODE, "SLURM_NODEID": node, "SLURMD_NODENAME": f"n{node}"}) for node in "01"
    )
    assert "--nnodes=2" in first
    assert "--rdzv-conf=is_host=1" in first
    assert "--rdzv-conf=is_host=0" in second
    (place,) = {flag for flag in first + second if flag.startswith("--rdzv-endpoint=")}
    assert place.startswith("--rdzv-endpoint=n3:")


@pytest.mark.parametrize("name", ["SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURMD_NODENAME"])
def test_a_process_not_started_by_srun_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} \(not set\): start it with srun"):
        rendezvous_flags({key: value for key, value in NODE.items() if key != name})


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([75, 75], 75),
        ([75, -15], 75),  # torchrun ended the second when the first had left
        ([-15, 75], 75),
        ([3, 3], 3),
        ([2], 2),
        ([1, -9], 1),
        ([-9, 1], 137),
        ([130], 130),
    ],
)
def test_the_status_of_a_node_is_that_of_its_ranks(codes: list[int], status: int) -> None:
    assert status_of(codes) == status


@pytest.mark.nightly
def test_a_signal_before_the_ranks_are_started_ends_it() -> None:
    done = run("-c", f"from megatron_zpp.commands.torchrun import pass_on; pass_on({int(signal.SIGUSR1)})")
    assert (done.returncode, done.stderr) == (128 + signal.SIGUSR1, "")
