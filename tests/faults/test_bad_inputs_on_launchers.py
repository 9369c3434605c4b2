"""Bad inputs of two ranks, as torchrun and srun start them: one rank says why, and nothing is written."""

import re
from pathlib import Path

import pytest

from tests.faults.cases import Case
from tests.faults.server import Programs
from tests.faults.test_bad_inputs import (  # noqa: F401 - fixtures
    CASES,
    PROCESSOR,
    PROMPT,
    contents,
    good_site,
    programs,
    site,
)
from tests.support import free_port

LAUNCHERS = ("torchrun", "srun")
ANYWHERE = [
    case
    for case in CASES
    if case.program == "pretrain" and case.status == 2 and not case.env
    if "the 1 rank of a node" not in case.said  # no mistake of two
]


def environment(launcher: str, rank: int, port: str) -> dict[str, str]:
    """Of one of two ranks of a node."""
    if launcher == "torchrun":
        found = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("case", ANYWHERE, ids=[case.name for case in ANYWHERE])
def test_one_of_two_ranks_says_the_line(
    site: Path,  # noqa: F811
    programs: Programs,  # noqa: F811
    launcher: str,
    case: Case,
) -> None:
    if case.harm:
        case.harm(site)
    before, port = contents(site), str(free_port())
    ranks = [(case.command, environment(launcher, rank, port)) for rank in range(2)]
    ended = programs.run_ranks(ranks, site, timeout=240)
    assert {done.status for done in ended} == {2}, [done.stderr for done in ended]
    lines = "".join(done.stderr for done in ended).splitlines()
    assert len(lines) == 1, lines
    assert re.search(".*".join(map(re.escape, case.said.split(" … "))), lines[0])
    assert [done.stdout for done in ended] == ["", ""]
    assert max(done.seconds for done in ended) < PROMPT  # a wait for the other rank would take minutes
    assert max(done.processor for done in ended) < PROCESSOR
    assert contents(site) == before
