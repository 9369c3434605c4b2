"""Adds csrc/ to the package, and its dependencies, of which requirements.txt has the versions."""

import re
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithSources(build_py):
    """Copies csrc/ into the package, where megatron_zpp/ops/toolchain.py finds it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable package is in the repository, beside csrc/
            shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "megatron_zpp" / "csrc", dirs_exist_ok=True)


def requirement_groups() -> dict[str, list[str]]:
    """The packages of requirements.txt by group, which a line `# [GROUP] …` begins."""
    groups: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if header := re.match(r"# \[(\w+)\]", line):
            group = groups.setdefault(header[1], [])
        elif line and not line.startswith("#"):
            group.append(line)
    return groups


extras = requirement_groups()
del extras["tests"]
oldest_torch, _ = runpy.run_path(str(ROOT / "megatron_zpp" / "version.py"))["TORCH_TESTED"]
dependencies = [re.sub("^torch==.*", f"torch>={oldest_torch}", each) for each in extras.pop("run")]
extras["all"] = [each for group in extras.values() for each in group]
setup(cmdclass={"build_py": BuildWithSources}, install_requires=dependencies, extras_require=extras)
