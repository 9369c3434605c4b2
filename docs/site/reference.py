"""Renders the option classes as pages: every flag with its type, default, bounds and help.

The site's pages of flags are made from the classes when the site is built, so they cannot be out of date.
"""

import dataclasses
import re
import types
import typing
from typing import Any

from megatron_zpp.commands.build_corpus import CorpusConfig
from megatron_zpp.commands.evaluate import EvaluateConfig
from megatron_zpp.commands.export_checkpoint import ExportConfig
from megatron_zpp.commands.import_checkpoint import ImportOptions
from megatron_zpp.commands.islands import HubConfig
from megatron_zpp.commands.plot import PlotConfig
from megatron_zpp.commands.preprocess_data import PreprocessConfig
from megatron_zpp.commands.report import ReportConfig
from megatron_zpp.commands.sample import SampleConfig
from megatron_zpp.commands.train_tokenizer import TrainTokenizerConfig
from megatron_zpp.config.options import Options, flag_of
from megatron_zpp.config.root import Config
from megatron_zpp.config.sources.settings_file import DeepSpeedFile, SettingsFile
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.generate.loading import CheckpointOptions, DeviceOptions

TITLES = {"reference/pretrain_gpt.md": "train", "reference/programs.md": "Other commands"}
PRETRAINING = (*typing.get_type_hints(Config).values(), SettingsFile, DeepSpeedFile)
_OF_A_CHECKPOINT = (CheckpointOptions, DeviceOptions)
PROGRAMS: dict[str, tuple[type[Options], ...]] = {
    "corpus": (CorpusConfig,),
    "tokenizer": (TrainTokenizerConfig,),
    "preprocess": (PreprocessConfig, TokenizerConfig),
    "evaluate": (*_OF_A_CHECKPOINT, EvaluateConfig),
    "sample": (*_OF_A_CHECKPOINT, SampleConfig),
    "import": (ImportOptions, TokenizerConfig),
    "export": (ExportConfig,),
    "plot": (PlotConfig,),
    "report": (ReportConfig,),
    "islands": (HubConfig,),
}
FILES = {
    "pretrain_gpt.py": "train",
    "data/build_corpus.py": "corpus",
    "data/train_tokenizer.py": "tokenizer",
    "data/preprocess_data.py": "preprocess",
}
_KINDS = {int: "integer", float: "number", str: "text"}
_SIGNS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def reference_pages() -> dict[str, str]:
    """Return the pages of flags by their path in the site."""
    first, second = TITLES
    return {first: _pretraining_page(), second: _programs_page()}


def _pretraining_page() -> str:
    sections = []
    for cls in PRETRAINING:
        name, rest = _title(cls)
        sections += [f"## {name}", rest, table(cls, linked=True)]
    return "\n\n".join(
        [
            "# Flags of megatron-zpp train",
            "For everybody who looks up a flag. After reading this page you know each flag's type, default\n"
            "and bounds. The page is made from the classes that also make `megatron-zpp train --help all`.\n"
            "[Megatron-LM's other flags](../guide/megatron_flags.md), old flags and\n"
            "[DeepSpeed's keys](../guide/deepspeed.md) are translated to these flags.",
            "A value outside the bounds is refused in a line that names the flag. A switch takes no value.",
            *sections,
        ]
    )


def _programs_page() -> str:
    sections = []
    for program, classes in PROGRAMS.items():
        file = next((f"; `python {file}`" for file, command in FILES.items() if command == program), "")
        sections += [f"## {program}", f"`megatron-zpp {program}`{file}"]
        for cls in classes:
            sections += [": ".join(filter(None, _title(cls))), table(cls)]
    return "\n\n".join(
        [
            "# Flags of the other commands",
            "For everybody who prepares data or uses a checkpoint. After reading this page you know the\n"
            "flags of the commands beside [train](pretrain_gpt.md). Names in capitals are\n"
            "arguments without a flag.",
            *sections,
        ]
    )


def table(cls: type[Options], *, linked: bool = False) -> str:
    """Return a class's flags as a table; with `linked` each row has an anchor that is named like its flag."""
    hints = typing.get_type_hints(cls)
    rows = [("flag", "type", "default", "values", "meaning"), ("---",) * 5]
    for field in dataclasses.fields(cls):
        flag, hint = flag_of(field), _without_none(hints[field.name])
        shown, anchor = f"`{flag}`", flag.lstrip("-")
        if linked:
            shown = f"[{shown}](#{anchor}){{ #{anchor} }}"
        kind = "switch, also `--no-…`" if hint is bool and field.default is None else _kind(hint)
        rows.append((shown, kind, _default(field), _values(field, hint), _prose(field.metadata["help"])))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _without_none(hint: Any) -> Any:
    """Return T of T | None, and other types as they are."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _kind(hint: Any) -> str:
    """Return the type of a value in words: T, Literal, tuple[T, ...] or tuple[T, T]."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "choice"
    if typing.get_origin(hint) is tuple:
        return f"{'one or more' if parts[-1] is Ellipsis else len(parts)} × {_kind(parts[0])}"
    return "switch" if hint is bool else _KINDS[hint]


def _values(field: dataclasses.Field, hint: Any) -> str:
    """Return the possible values: the bounds of numbers, or the choices."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    bounds = field.metadata["bounds"]
    return ", ".join(f"{sign} {_number(bounds[name])}" for name, sign in _SIGNS.items() if name in bounds)


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return "off"
    if value is None or value == ():
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _title(cls: type) -> tuple[str, str]:
    """Return the name of a class's section of the help, and what the help says of it."""
    first = (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")
    name, _, rest = first.partition(": ")
    return name[0].upper() + name[1:], rest and f"{rest[0].upper()}{rest[1:]}."


def _prose(text: str) -> str:
    """Return a help text for a cell of a table, with its flags as code."""
    plain = text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;").replace("_", r"\_")
    return re.sub(r"(?<![\w-])--[a-z](?:[\w-]*\w)?", lambda flag: f"`{flag.group(0)}`", plain)
