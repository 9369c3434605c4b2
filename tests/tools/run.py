"""Runs a tool of data/ as a person would, and looks at what it left."""

import subprocess
import sys
from pathlib import Path

from tests.support import program

DATA = Path(__file__).resolve().parents[2] / "data"


def command(tool: str, *arguments: object) -> list[str]:
    """The command line of data/TOOL."""
    return [sys.executable, str(DATA / tool), *map(str, arguments)]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The finished tool, whatever its exit status."""
    return program(f"megatron_zpp.commands.{Path(tool).stem}", *arguments, HF_HUB_OFFLINE="1")


def succeed(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `run`, where anything but success fails the test."""
    result = run(tool, *arguments)
    assert result.returncode == 0, result.stderr
    return result


def fail(tool: str, *arguments: object, status: int = 1) -> str:
    """The one line that the tool says when it fails as it should, with no traceback."""
    result = run(tool, *arguments)
    assert result.returncode == status, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith(f"{tool}: error: ")]
    assert len(errors) == 1, result.stderr
    return errors[0]
