"""Simulated ranks all hear of a killed one, whichever it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, environment

RANKS = 32


@pytest.mark.nightly
def test_all_ranks_hear_the_right_name(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/lifelines.py", "--ranks", str(RANKS), "--kills", "1"]
    command += ["--processes", "2", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=240)
    victims = json.loads((tmp_path / "lifelines.json").read_text())["figures"]["ranks"][str(RANKS)]
    assert len(victims) == 3
    for name, (kill,) in victims.items():
        assert kill["heard"] == kill["named_the_victim"] == RANKS - 1, name
