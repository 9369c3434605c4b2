"""Tokenises JSON lines into the .bin/.idx files that training reads."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

from megatron_zpp.commands.interrupts import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from megatron_zpp.commands.preprocess_data import PROG, main
from megatron_zpp.config.command_line import run_tool

if __name__ == "__main__":
    run_tool(PROG, main)
