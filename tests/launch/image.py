"""The files of launch/Dockerfile's image, made without a daemon."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.support import ROOT


def build(directory: Path) -> dict[str, str]:
    """Copy what the Dockerfile copies, check the scripts that it starts, and return its variables."""
    variables = {}
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    for name, _, rest in (line.partition(" ") for line in lines if line and not line.startswith("#")):
        words = json.loads(rest) if name == "ENTRYPOINT" else shlex.split(rest)
        if name == "COPY":
            source, target = ROOT / words[0], directory / words[1]
            assert len(words) == 2
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)  # launch/ is there already
            else:
                shutil.copy(source, target)
        elif name == "ENV":
            variables.update(word.split("=", 1) for word in words)
        elif name in ("RUN", "ENTRYPOINT"):
            assert os.access(directory / words[0], os.X_OK)
            subprocess.run(["bash", "-n", directory / words[0]], check=True)
        else:
            assert name in ("FROM", "WORKDIR", "VOLUME")
    return variables
