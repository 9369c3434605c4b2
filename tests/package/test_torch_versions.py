"""The tested range of torch: where it is stated, and what a run outside it says."""

import re

import pytest

from megatron_zpp.version import TORCH_TESTED, untested_torch
from tests.config.command_line import SMALLEST
from tests.support import ROOT, run

# A torch that says it is another one: the run itself is real.
RUN = (
    "import runpy, sys, torch; torch.__version__ = sys.argv.pop(1); sys.argv[0] = 'pretrain_gpt.py';"
    "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
)


def test_outside_the_range_there_is_one_note() -> None:
    for version in ("2.8.0", "2.12.1+cu130", "2.15.9", "2.13.0a0+git1"):
        assert untested_torch(version) == []
    for version in ("2.7.1", "2.16.0", "2.100.0", "3.0.0"):
        (note,) = untested_torch(version)
        assert all(word in note for word in (version, *TORCH_TESTED))


def test_the_range_is_stated_as_it_is() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert untested_torch(pinned) == []
    first, last = map(re.escape, TORCH_TESTED)
    assert re.search(rf"Tested: torch {first} to {last} ", (ROOT / "README.md").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "said"), [(0, 1), (1, 0)])
def test_only_rank_0_warns(rank: int, said: int) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run("-c", RUN, "2.99.0", *SMALLEST, "--dry-run", **place)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("outside the tested range") == said
