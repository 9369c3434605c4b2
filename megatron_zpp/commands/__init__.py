"""The programs; `megatron-zpp COMMAND` (scripts.py) starts them."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the program, and imports this package first
    from megatron_zpp.commands.interrupts import end_on_interrupt

    end_on_interrupt()
