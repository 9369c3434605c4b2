"""Pretrains a GPT: one rank per process of torchrun or srun; `python pretrain_gpt.py …` is a single rank.

megatron_zpp/commands/pretrain.py is the table of contents of a run.
"""

from megatron_zpp.commands.scripts import before_torch, end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    before_torch()

from megatron_zpp.commands.pretrain import main

if __name__ == "__main__":
    main()
