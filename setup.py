"""Adds csrc/ to the package; pyproject.toml has everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CSRC = Path(__file__).parent / "csrc"


class BuildWithSources(build_py):
    """Copies csrc/ into the package, where megatron_zpp/native/sources.py finds it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable package is in the repository, beside csrc/
            shutil.copytree(CSRC, Path(self.build_lib) / "megatron_zpp" / "csrc", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithSources})
