"""Every bad input is refused: one line that says what and what to do, at once, and nothing is written.

Command lines that are refused as they are read are read here. Other cases run in forks of one process
(server.py), whose exit status, streams and files are looked at as a person's shell would show them; some of
each kind run once more as programs of their own.
"""

import re
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_command_line
from tests.faults.cases import Case, flip
from tests.faults.command_lines import CHECKED, COMMAND_LINES
from tests.faults.files import FILES
from tests.faults.launchers import FOUR, LAUNCHERS
from tests.faults.programs import PROGRAMS
from tests.faults.server import Done, run_program, run_ranks
from tests.faults.site import COMMANDS, make_site
from tests.faults.tools import TOOLS
from tests.support import ROOT, free_port, nightly, run

CASES = [*COMMAND_LINES[:3], *CHECKED, *LAUNCHERS, *FILES, *TOOLS, *PROGRAMS]
AS_PROGRAMS = [COMMAND_LINES[0], *map(nightly, (FILES[0], TOOLS[0], LAUNCHERS[0]))]
PROMPT = 60  # seconds on a machine that is busy; ranks that wait for others do so for three minutes
PROCESSOR = 5  # seconds, which do not depend on what else the machine does


@pytest.fixture(scope="module")
def good_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("good")
    make_site(site)
    return site


@pytest.fixture
def site(good_site: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may change."""
    copy = tmp_path / "site"
    shutil.copytree(good_site, copy)
    yield copy
    for path in (copy, *copy.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)  # or it could not be removed
    shutil.rmtree(copy)


def contents(site: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and directory with what a write would change."""
    found = {}
    for path in site.rglob("*"):
        status = path.lstat()
        times = 0 if path.is_dir() else status.st_mtime_ns  # probing a directory changes its time
        found[str(path)] = (status.st_mode, 0 if path.is_dir() else status.st_size, times)
    return found


def check_words(said: str, case: Case) -> None:
    """All expected parts, in order."""
    expected = ".*".join(map(re.escape, case.words.split(" … ")))
    assert re.search(expected, said), f"{expected!r} is not in {said!r}"


def check(done: Done, case: Case) -> None:
    """One line with all expected parts in order."""
    assert done.status == case.status, done.stderr
    assert done.stderr.endswith("\n")
    assert done.stderr.count("\n") == 1, done.stderr
    check_words(done.stderr, case)
    assert done.seconds < PROMPT
    assert done.processor < PROCESSOR


@pytest.mark.parametrize("program", ["preprocess", "corpus", "tokenizer", "sample"])
def test_the_good_command_line_works(site: Path, program: str) -> None:
    """Otherwise a refusal below could have another cause; `make_site` has run pretrain_gpt.py's."""
    done = run_program(*COMMANDS[program].split(), cwd=site, timeout=240)
    assert done.status == 0, done.stderr


@pytest.mark.parametrize("case", COMMAND_LINES, ids=[case.name for case in COMMAND_LINES])
def test_a_command_line_is_refused_as_it_is_read(case: Case) -> None:
    _, *argv = case.command
    with pytest.raises(UsageError) as refused:
        parse_command_line(argv)
    assert "\n" not in str(refused.value)
    check_words(str(refused.value), case)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_bad_input_is_refused(site: Path, case: Case) -> None:
    if case.harm:
        case.harm(site)
    before = contents(site)
    done = run_program(*case.command, cwd=site, env=case.env)
    check(done, case)
    if case.program == "pretrain":
        assert done.stdout == ""
    assert contents(site) == before


@pytest.mark.parametrize("case", AS_PROGRAMS, ids=lambda case: case.name)
def test_a_bad_input_is_refused_by_a_separate_process(site: Path, case: Case) -> None:
    script, *argv = case.command
    before = contents(site)
    began, used = time.monotonic(), processor_of_children()
    done = run("-c", LAUNCH, site, ROOT / script, *argv, **case.env)
    seconds, processor = time.monotonic() - began, processor_of_children() - used
    assert processor > 0.1  # of python and its imports, or it was not counted
    check(Done(done.returncode, done.stdout, done.stderr, seconds, processor), case)
    assert contents(site) == before


def processor_of_children() -> float:
    """Seconds computed by processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


LAUNCH = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"


def two_ranks(site: Path, *extra: tuple[str, ...]) -> list[Done]:
    """Both ranks of one node, each with additional flags."""
    command, port = COMMANDS["pretrain"].split(), str(free_port())
    env = FOUR | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    ranks = [
        ((*command, *argv), env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, argv in enumerate(extra)
    ]
    return run_ranks(ranks, site, timeout=240)


def test_damage_that_one_rank_reads_ends_all_ranks(site: Path) -> None:
    (good, other) = two_ranks(site, *[("--verify-data", "--train-iters", "1")] * 2)
    assert (good.status, other.status) == (0, 0)
    assert " verified 10,000 bytes of tokens in " in good.stdout
    flip("text.bin", -1)(site)  # its only chunk is the second rank's to read
    before = contents(site)
    ended = two_ranks(site, *[("--verify-data",)] * 2)
    (speaker,) = (done for done in ended if done.stderr)
    check(speaker, Case("", "text.bin: damaged between bytes 0 and 10000 … preprocess the data again"))
    assert {done.status for done in ended} == {1}
    said = [line for done in ended for line in done.stdout.splitlines() if not line.startswith("[Gloo] ")]
    assert said == []  # except what gloo of torch 2.8 prints itself
    assert contents(site) == before
