"""Ctrl-C at any moment of a start: one line, and no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (["pretrain_gpt.py", "--help"], ["megatron_zpp/__main__.py", "sample", "--help"])


def interrupted(argv: list[str], after: float) -> tuple[int, str]:
    """The status and stderr of a program that gets SIGINT some seconds after its first line of Python."""
    ready, told = os.pipe()
    code = "import os, runpy, sys; os.write(int(sys.argv[1]), b'1'); "
    code += "sys.argv = sys.argv[2:]; sys.path.insert(0, os.getcwd()); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(told), *argv],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[told],
    )
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


@pytest.mark.parametrize("argv", PROGRAMS, ids=lambda argv: argv[-2])
def test_an_interrupted_start_says_one_line(argv: list[str]) -> None:
    """While torch is imported, and at the end of the imports, when a program may have ended or be ending."""
    for after in (0.3, 1.0):
        status, said = interrupted(argv, after)
        assert "Traceback" not in said, (after, said)
        assert len(said.splitlines()) <= 1, (after, said)
        assert status in (0, 130) or (status == -signal.SIGINT and not said), (after, said)
        if status == 130:
            assert said.rstrip().endswith(": interrupted")
