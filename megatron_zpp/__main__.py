"""`python -m megatron_zpp COMMAND`: see commands/scripts.py."""

from megatron_zpp.commands.scripts import main

if __name__ == "__main__":
    main()
