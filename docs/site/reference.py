"""Renders the option classes as pages: every flag with its type, default, bounds and help.

The site's pages of flags are made from the classes when the site is built, so they cannot be out of date.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

from data.build_corpus import CorpusConfig
from data.preprocess_data import PreprocessConfig
from data.train_tokenizer import TrainTokenizerConfig
from megatron_zpp.commands.evaluate import EvaluateConfig
from megatron_zpp.commands.huggingface import ExportConfig, ImportConfig
from megatron_zpp.commands.plot import PlotConfig
from megatron_zpp.commands.report import ReportConfig
from megatron_zpp.commands.sample import SampleConfig
from megatron_zpp.config.legacy.deepspeed import DeepSpeedFile
from megatron_zpp.config.options import Options, flag_of
from megatron_zpp.config.root import Config
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.generate.loading import CheckpointOptions, DeviceOptions
from megatron_zpp.generate.server_options import ServerOptions

TITLES = {"reference/pretrain_gpt.md": "pretrain_gpt.py", "reference/programs.md": "Other programs"}
PRETRAINING = (*typing.get_type_hints(Config).values(), DeepSpeedFile)
_OF_A_CHECKPOINT = (CheckpointOptions, DeviceOptions)
PROGRAMS: dict[str, tuple[type[Options], ...]] = {
    "data/build_corpus.py": (CorpusConfig,),
    "data/train_tokenizer.py": (TrainTokenizerConfig,),
    "data/preprocess_data.py": (PreprocessConfig, TokenizerConfig),
    "megatron_zpp.commands.evaluate": (*_OF_A_CHECKPOINT, EvaluateConfig),
    "megatron_zpp.commands.sample": (*_OF_A_CHECKPOINT, SampleConfig),
    "megatron_zpp.commands.serve": (*_OF_A_CHECKPOINT, ServerOptions),
    "megatron_zpp.commands.huggingface import": (ImportConfig, TokenizerConfig),
    "megatron_zpp.commands.huggingface export": (ExportConfig,),
    "megatron_zpp.commands.plot": (PlotConfig,),
    "megatron_zpp.commands.report": (ReportConfig,),
}
_KINDS = {int: "whole number", float: "number", str: "text"}
_WORDS = {"at_least": "at least", "at_most": "at most", "above": "above", "below": "below"}


def reference_pages() -> dict[str, str]:
    """Return the pages of flags by their path in the site."""
    first, second = TITLES
    return {first: _pretraining_page(), second: _programs_page()}


def _pretraining_page() -> str:
    sections = [f"## {_title(cls)}\n\n{table(cls, linked=True)}" for cls in PRETRAINING]
    return "\n\n".join(
        [
            "# Flags of pretrain_gpt.py",
            "For everybody who looks up a flag. After reading this page you know each flag's type, default\n"
            "and bounds. The page is made from the classes that also make `python pretrain_gpt.py --help`.\n"
            "[Old flags and DeepSpeed's keys](../guide/deepspeed.md) are translated to these flags.",
            "A value outside the bounds is refused in a line that names the flag. A switch takes no value.",
            *sections,
        ]
    )


def _programs_page() -> str:
    sections = []
    for program, classes in PROGRAMS.items():
        command = program if program.endswith(".py") else f"-m {program}"
        parts = [f"**{_title(cls)}**\n\n{table(cls)}" for cls in classes]
        sections.append("\n\n".join([f"## {program}", f"`python {command}`", *parts]))
    return "\n\n".join(
        [
            "# Flags of the other programs",
            "For everybody who prepares data or uses a checkpoint. After reading this page you know the\n"
            "flags of the programs beside [pretrain_gpt.py](pretrain_gpt.md). Names in capitals are\n"
            "arguments without a flag.",
            *sections,
        ]
    )


def table(cls: type[Options], *, linked: bool = False) -> str:
    """Return a class's flags as a table; with `linked` each row has an anchor that is named like its flag."""
    hints = typing.get_type_hints(cls)
    rows = [("flag", "type", "default", "bounds", "meaning"), ("---",) * 5]
    for field in dataclasses.fields(cls):
        flag = flag_of(field)
        shown = f"`{flag}`"
        if linked:
            anchor = flag.lstrip("-")
            shown = f"[{shown}](#{anchor}){{ #{anchor} }}"
        bounds = field.metadata["bounds"]
        limits = ", ".join(f"{_WORDS[name]} {bound}" for name, bound in bounds.items())
        rows.append(
            (shown, _kind(hints[field.name]), _default(field), limits, _escaped(field.metadata["help"]))
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _kind(hint: Any) -> str:
    """Return the type of a value in words: T, T | None, Literal, tuple[T, ...] or tuple[T, T]."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in parts if part is not type(None))
        return "switch, also `--no-…`" if hint is bool else _kind(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + _listed(parts)
    if typing.get_origin(hint) is tuple:
        count = "one or more" if parts[-1] is Ellipsis else str(len(parts))
        return f"{count} × {_kind(parts[0])}"
    return "switch" if hint is bool else _KINDS[hint]


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return "off"
    if value is None or value == ():
        return ""
    return _escaped(f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _title(cls: type) -> str:
    """Return the first line of a class's docstring, which is also the title of its section of the help."""
    title = (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")
    return title[0].upper() + title[1:]


def _escaped(text: str) -> str:
    """Return text that markdown shows as it is, in a cell of a table."""
    plain = text.replace("|", r"\|")
    return (
        plain if plain.startswith("`") else plain.replace("*", r"\*").replace("<", "&lt;").replace("_", r"\_")
    )
