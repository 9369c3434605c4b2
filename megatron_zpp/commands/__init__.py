"""The programs; `megatron-zpp COMMAND` (scripts.py) starts them."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for a module of this package, which is no program by itself
    sys.exit("start programs by: python -m megatron_zpp COMMAND")
