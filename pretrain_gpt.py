"""Pretrains a GPT: one rank per process of torchrun or srun; `python pretrain_gpt.py …` is a single rank.

megatron_zpp/commands/pretrain.py is the table of contents of a run.
"""

from megatron_zpp.commands.scripts import run


def main() -> None:
    """Train, as `megatron-zpp train` does."""
    run("train")


if __name__ == "__main__":
    main()
