"""launch/local.sh: one process a rank, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ROOT, environment

SCRIPT = ROOT / "launch" / "local.sh"


def local(*argv: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *argv],
        env=environment(PYTHON=sys.executable, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write(directory: Path, text: str) -> str:
    program = directory / "program.py"
    program.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(program)


def test_every_rank_gets_the_launchers_variables_and_the_flags(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()\n"
        "values = ' '.join(os.environ[name] for name in names)\n"
        "sys.stdout.write(f\"{values} {int(os.environ['MASTER_PORT']) > 0} {sys.argv[1:]}\\n\")",
    )
    out, err = local("-n", "3", program, "--flag", "two words").communicate(timeout=60)
    expected = [f"{rank} 3 {rank} 3 127.0.0.1 True ['--flag', 'two words']" for rank in range(3)]
    assert (sorted(out.splitlines()), err) == (expected, "")


def test_the_first_failure_ends_the_others_and_is_the_status(tmp_path: Path) -> None:
    program = write(tmp_path, "time.sleep(0.2 if rank == 1 else 60)\nsys.exit(7)")
    child = local("-n", "3", program)
    started = time.monotonic()
    child.communicate(timeout=30)
    assert child.returncode == 7
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_rank(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    pids = tmp_path / "pids"
    program = write(tmp_path, f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)")
    child = local("-n", "2", program)
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().count("\n") == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(sent)
    child.communicate(timeout=30)
    assert child.returncode == status
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("argv", [(), ("-n", "0", "x.py"), ("-n", "two", "x.py"), ("-x",)])
def test_bad_usage_is_status_2(argv: tuple[str, ...]) -> None:
    child = local(*argv)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 2
    assert "launch/local.sh" in err
