"""launch/Dockerfile without a daemon: each stage has the files that it runs, and at night they run."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.test_quickstart import SHORT
from tests.support import ROOT, environment

INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "ENTRYPOINT"}


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage: a name and the rest of its line."""
    text = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in lines:
        name, _, rest = line.partition(" ")
        assert name in INSTRUCTIONS
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def build(directory: Path) -> dict[str, str]:
    """Copy the files of all stages to `directory`, check the scripts that they start, return their ENV."""
    variables = {}
    for stage in stages():
        for name, rest in stage:
            words = shlex.split(rest)
            if name == "COPY":
                *sources, target = words
                assert target.endswith("/") or len(sources) == 1
                for source in sources:
                    to = directory / target
                    to = to / Path(source).name if target.endswith("/") else to
                    to.parent.mkdir(parents=True, exist_ok=True)
                    if (ROOT / source).is_dir():
                        shutil.copytree(ROOT / source, to, dirs_exist_ok=True)
                    else:
                        shutil.copy(ROOT / source, to)
            elif name == "ENV":
                variables.update(word.split("=", 1) for word in words)
            elif name in ("RUN", "ENTRYPOINT"):
                script = json.loads(rest)[0] if name == "ENTRYPOINT" else words[0]
                assert os.access(directory / script, os.X_OK)
                subprocess.run(["bash", "-n", directory / script], check=True)
                for needed in re.findall(r"(?<=source=)launch/\S+", (directory / script).read_text()):
                    assert (directory / needed).exists()
    return variables


def test_each_stage_has_the_files_that_it_runs(tmp_path: Path) -> None:
    first, last = stages()
    assert first[0][1].endswith(" AS environment")
    assert last[0][1] == "environment"
    assert build(tmp_path) == {"QUICKSTART_DIR": "/work"}
    assert not (tmp_path / ".venv").exists()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_quickstart_runs_with_the_files_of_the_image(tmp_path: Path) -> None:
    image, work = tmp_path / "image", tmp_path / "work"
    build(image)
    (image / ".venv").symlink_to(ROOT / ".venv")
    argv, place = [image / "launch" / "quickstart.sh", *SHORT], environment(PYTHONPATH="")
    done = subprocess.run(
        argv,
        cwd=image,
        env={**place, "QUICKSTART_DIR": str(work)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (work / "report.html").exists()
