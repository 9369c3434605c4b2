"""Makes a checkpoint of iteration 0 from a model of Hugging Face, Megatron-LM or DeepSpeed.

Files are read as data: nothing that a pickle names is imported or called.
"""

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
from megatron_zpp.checkpoint.huggingface.importing import import_checkpoint
from megatron_zpp.checkpoint.huggingface.named_directory import check_empty, named_directory
from megatron_zpp.config.command_line import command_groups
from megatron_zpp.config.options import REQUIRED, Options, count, option, option_error, optional
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.config.shapes.huggingface import CONFIG
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.urls import local_path
from megatron_zpp.storage.checksums import DamagedFile

_READERS: Mapping[str, Callable[[Path], ForeignModel]] = {
    "torch_dist": read_torch_dist,
    "mp_rank": read_rank_files,
    "zero": read_zero,
    "universal": read_universal,
}
_OF_TRANSFORMERS = ("safetensors", "pickled")  # import_checkpoint says what is wrong with them


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """import: a model of another program"""

    source: str = option(
        REQUIRED,
        "A directory with config.json and safetensors, or hf:ORG/NAME[@REVISION] of the hub; or what --save "
        "of Megatron-LM or DeepSpeed wrote, or one iteration of it.",
        positional=True,
        metavar="SOURCE",
    )
    checkpoint_dir: str = option(
        REQUIRED, "Directory of checkpoints, to be made.", positional=True, metavar="CHECKPOINT_DIR"
    )
    program: Literal["auto", "transformers", "megatron", "deepspeed"] = option(
        "auto", "The program that wrote it; auto: by names of files.", flag="--from"
    )
    ckpt_step: int | None = optional(
        "Megatron-LM, DeepSpeed: this iteration instead of the latest.", at_least=0
    )
    make_vocab_size_divisible_by: int = count(
        128, "The vocabulary is padded to a multiple of this, as the run's flag says.", at_most=2**20
    )


def main() -> None:
    """Import, and print what was mapped."""
    groups = {"import": ImportOptions, "tokenizer": TokenizerConfig}
    parsed = command_groups(groups, __doc__)
    config, tokenizer = parsed["import"], parsed["tokenizer"]
    found = _find(config)
    check_empty("CHECKPOINT_DIR", local_path("CHECKPOINT_DIR", config.checkpoint_dir))
    if found is None:
        lines = import_checkpoint(
            named_directory("SOURCE", config.source),
            Path(config.checkpoint_dir),
            tokenizer if tokenizer.tokenizer_type else None,
            config.make_vocab_size_divisible_by,
        )
    else:
        lines = _import_foreign(config, found, tokenizer)
    print("\n".join(lines))


def _import_foreign(config: ImportOptions, found: Foreign, tokenizer: TokenizerConfig) -> list[str]:
    if tokenizer.tokenizer_type is None:
        raise tokenizer.error("tokenizer_type", "give the tokenizer that the model was trained with")
    try:
        model = _READERS[found.layout](found.path)
        return import_foreign(
            model,
            found.iteration,
            Path(config.checkpoint_dir),
            tokenizer,
            config.make_vocab_size_divisible_by,
        )
    except DamagedFile as damage:
        raise option_error("SOURCE", config.source, str(damage)) from None


def _find(config: ImportOptions) -> Foreign | None:
    """Return the checkpoint of Megatron-LM or DeepSpeed to import; None for a model of transformers.

    Raises ValueError, naming the flag, if it is neither.
    """
    if config.source.startswith(HUGGINGFACE):
        for name, default in (("program", "auto"), ("ckpt_step", None)):
            if getattr(config, name) != default:
                raise config.error(name, f"has no meaning with SOURCE {config.source}; omit it")
        return None
    root = Path(config.source)
    found = recognise(root)
    if config.ckpt_step is not None:
        names = (f"iter_{config.ckpt_step:07d}", f"global_step{config.ckpt_step}")
        paths = [root / f"{name}{end}" for name in names for end in ("", "_universal")]
        found = next(filter(None, map(recognise, paths)), None)
        if found is None:
            raise config.error("ckpt_step", f"not in {config.source}; name one that is there")
    if found is not None:
        if config.program not in ("auto", found.program):
            raise option_error("--from", config.program, f"{found.words}; omit the flag")
        if found.layout not in (*_READERS, *_OF_TRANSFORMERS):
            raise option_error("SOURCE", config.source, f"{found.words}; {found.remedy}")
        return found if found.layout in _READERS else None
    if config.program in ("megatron", "deepspeed") or not (root / CONFIG).exists():
        known = "transformers, Megatron-LM or DeepSpeed"
        raise config.error("source", f"holds no model of {known}; name a directory that does")
    return None
