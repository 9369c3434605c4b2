"""Trains a SentencePiece tokenizer on text files or JSON lines."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

from megatron_zpp.commands.scripts import run

if __name__ == "__main__":
    run("tokenizer")
