"""Runs the program of a page in a process that has imported what it needs."""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the file that is the first argument, in its directory, with the others."""
    sys.argv = sys.argv[1:]
    os.chdir(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
