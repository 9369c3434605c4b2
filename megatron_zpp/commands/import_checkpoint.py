"""Weights of Megatron-LM's and DeepSpeed's checkpoints, as a checkpoint of iteration 0:

python -m megatron_zpp.commands.import_checkpoint DIRECTORY --output NEW --tokenizer-type …

Files are read as data: nothing that a pickle names is imported or called.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_zpp.checkpoint.foreign.deepspeed import read_universal, read_zero
from megatron_zpp.checkpoint.foreign.importing import import_foreign
from megatron_zpp.checkpoint.foreign.model import ForeignModel
from megatron_zpp.checkpoint.foreign.rank_files import read_rank_files
from megatron_zpp.checkpoint.foreign.recognise import Foreign, recognise
from megatron_zpp.checkpoint.foreign.torch_dist import read_torch_dist
from megatron_zpp.checkpoint.huggingface.named_directory import check_empty
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import REQUIRED, Options, option, option_error, parse_all
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.urls import local_path
from megatron_zpp.storage.checksums import DamagedFile

PROG = "import_checkpoint"
_READERS: Mapping[str, Callable[[Path], ForeignModel]] = {
    "torch_dist": read_torch_dist,
    "mp_rank": read_rank_files,
    "zero": read_zero,
    "universal": read_universal,
}


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """import: a checkpoint of another program"""

    directory: str = option(
        REQUIRED,
        "What --save of that program wrote, or one iteration of it.",
        positional=True,
        metavar="DIRECTORY",
    )
    output: str = option(REQUIRED, "Directory of checkpoints, to be made.")
    program: Literal["auto", "megatron", "deepspeed"] = option(
        "auto", "The program that wrote it; auto: by names of files.", flag="--from"
    )
    ckpt_step: int | None = option(None, "This iteration instead of the latest.", at_least=0)
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded to a multiple of this, as the run's flag says.",
        at_least=1,
        at_most=2**20,
    )


def main() -> None:
    """Import, and print what was mapped."""
    groups = {"import": ImportOptions, "tokenizer": TokenizerConfig}
    parsed = parse_all(groups, PROG, __doc__ or "", sys.argv[1:])
    config, tokenizer = parsed["import"], parsed["tokenizer"]
    found = _find(config)
    check_empty("--output", local_path("--output", config.output))
    if tokenizer.tokenizer_type is None:
        raise tokenizer.error("tokenizer_type", "give the tokenizer that the model was trained with")
    try:
        model = _READERS[found.layout](found.path)
        lines = import_foreign(
            model, found.iteration, Path(config.output), tokenizer, config.make_vocab_size_divisible_by
        )
    except DamagedFile as damage:
        raise option_error("DIRECTORY", config.directory, str(damage)) from None
    print("\n".join(lines))


def _find(config: ImportOptions) -> Foreign:
    """Return the checkpoint to import. Raises ValueError, naming the flag, if it is none."""
    root = Path(config.directory)
    found = recognise(root)
    if config.ckpt_step is not None:
        names = (f"iter_{config.ckpt_step:07d}", f"global_step{config.ckpt_step}")
        paths = [root / f"{name}{end}" for name in names for end in ("", "_universal")]
        found = next(filter(None, map(recognise, paths)), None)
        if found is None:
            raise config.error("ckpt_step", f"not in {config.directory}; name one that is there")
    if found is None:
        raise config.error("directory", "holds no checkpoint of Megatron-LM or DeepSpeed; name one that does")
    if found.layout not in _READERS:
        raise option_error("DIRECTORY", config.directory, f"{found.words}; {found.remedy}")
    if config.program not in ("auto", found.program):
        raise option_error("--from", config.program, f"{found.words}; omit the flag")
    return found


if __name__ == "__main__":
    run_tool(PROG, main)
