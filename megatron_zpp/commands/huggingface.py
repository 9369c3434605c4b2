"""Weights from and to Hugging Face's format, with their tokenizer:

python -m megatron_zpp.commands.huggingface import HF_DIR CHECKPOINT_DIR
python -m megatron_zpp.commands.huggingface export CHECKPOINT_DIR HF_DIR
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.directory import each_candidate, read_newest
from megatron_zpp.checkpoint.huggingface.exporting import check_target, export_checkpoint
from megatron_zpp.checkpoint.huggingface.importing import import_checkpoint
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import REQUIRED, Options, UsageError, option, parse_all, parse_options
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.urls import local_path
from megatron_zpp.storage.checksums import DamagedFile

PROG = "huggingface"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Options):
    """import: a Hugging Face directory to a checkpoint"""

    hf_dir: str = option(REQUIRED, "Holds config.json and safetensors.", positional=True, metavar="HF_DIR")
    checkpoint_dir: str = option(REQUIRED, "To be made.", positional=True, metavar="CHECKPOINT_DIR")
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded to a multiple of this, as the run's flag says.",
        at_least=1,
        at_most=2**20,
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Options):
    """export: a checkpoint to a Hugging Face directory"""

    checkpoint_dir: str = option(
        REQUIRED, "The directory of pretrain_gpt.py --save.", positional=True, metavar="CHECKPOINT_DIR"
    )
    hf_dir: str = option(REQUIRED, "To be made.", positional=True, metavar="HF_DIR")
    ckpt_step: int | None = option(None, "This iteration instead of the latest.", at_least=0)
    max_file_gib: float = option(4, "Maximum size of one file of weights, in GiB.", above=0)
    tokenizer: bool = option(True, "Omit the tokenizer.")


def main() -> None:
    """Import or export, according to the first argument."""
    action, *argv = sys.argv[1:] or [""]
    if action == "import":
        lines = _import(argv)
    elif action == "export":
        lines = _export(argv)
    elif action in ("-h", "--help"):
        lines = [__doc__.strip(), "", "--help after import or export lists its flags"]
    else:
        raise UsageError(
            f"{action or 'no action'}: must be import HF_DIR CHECKPOINT_DIR or export CHECKPOINT_DIR HF_DIR"
        )
    print("\n".join(lines))


def _import(argv: list[str]) -> list[str]:
    groups = {"import": ImportConfig, "tokenizer": TokenizerConfig}
    parsed = parse_all(groups, f"{PROG} import", ImportConfig.__doc__ or "", argv)
    config, tokenizer = parsed["import"], parsed["tokenizer"]
    return import_checkpoint(
        NamedDirectory("HF_DIR", config.hf_dir, Path(config.hf_dir)),
        local_path("CHECKPOINT_DIR", config.checkpoint_dir),
        tokenizer if tokenizer.tokenizer_type else None,
        config.make_vocab_size_divisible_by,
    )


def _export(argv: list[str]) -> list[str]:
    config = parse_options(ExportConfig, f"{PROG} export", ExportConfig.__doc__ or "", argv)
    named = NamedDirectory("CHECKPOINT_DIR", config.checkpoint_dir, Path(config.checkpoint_dir))
    find = partial(each_candidate, config.checkpoint_dir, config.ckpt_step, named.flag)
    if next(find(), None) is not None:
        check_target("HF_DIR", local_path("HF_DIR", config.hf_dir))
    export = partial(
        export_checkpoint,
        named,
        target=Path(config.hf_dir),
        with_tokenizer=config.tokenizer,
        file_bytes=int(config.max_file_gib * _GIB),
    )
    try:
        lines = read_newest(find, export)
    except DamagedFile as damage:
        raise named.error(f"{damage}; choose another one with --ckpt-step") from None
    if lines is None:
        raise named.error("holds no checkpoint; name what pretrain_gpt.py --save wrote to")
    return lines


if __name__ == "__main__":
    run_tool(PROG, main)
