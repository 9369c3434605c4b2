"""Writes a checkpoint for transformers: weights, config.json and tokenizer."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.directory import each_candidate, read_newest
from megatron_zpp.checkpoint.huggingface.exporting import check_target, export_checkpoint
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.command_line import command_options
from megatron_zpp.config.options import REQUIRED, Options, option, optional
from megatron_zpp.config.values.urls import local_path
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.hub import make_repository, push

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Options):
    """export: a checkpoint to a Hugging Face directory"""

    checkpoint_dir: str = option(
        REQUIRED, "The directory of a run's --save.", positional=True, metavar="CHECKPOINT_DIR"
    )
    hf_dir: str = option(REQUIRED, "To be made.", positional=True, metavar="HF_DIR")
    ckpt_step: int | None = optional("This iteration instead of the latest.", at_least=0)
    max_file_gib: float = option(4, "Maximum size of one file of weights, in GiB.", above=0)
    tokenizer: bool = option(True, "Omit the tokenizer.")
    push_to_hub: str | None = optional(
        "Upload HF_DIR to this repository of the Hugging Face hub, with the token of HF_TOKEN or of "
        "`hf auth login`. If it does not exist, it is made, and is private.",
        metavar="ORG/NAME",
    )


def main() -> None:
    """Export, and print what was checked."""
    config = command_options(ExportConfig, __doc__)
    repository = config.push_to_hub
    if repository is not None:
        make_repository("--push-to-hub", repository)  # before the work, whether one may write there
    print("\n".join(_export(config)), flush=True)
    if repository is None:
        return
    try:
        print(f"pushed: {push('--push-to-hub', repository, Path(config.hf_dir))}")
    except ValueError as error:
        again = f"hf upload {repository} {config.hf_dir}"
        raise ValueError(f"{error}; {config.hf_dir} is whole, and {again} tries again") from error


def _export(config: ExportConfig) -> list[str]:
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
        raise named.error("holds no checkpoint; name what a run's --save wrote to")
    return lines
