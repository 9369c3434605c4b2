"""Collects text as JSON lines, one document per line, from files, the Hugging Face hub or Python's source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

from megatron_zpp.commands.scripts import run

if __name__ == "__main__":
    run("corpus")
