"""The table of guide/megatron_flags.md: what becomes of each flag of Megatron-LM's parser."""

import re
import typing
from pathlib import Path

from megatron_zpp.config.legacy.old_flags import OLD_FLAGS
from megatron_zpp.config.legacy.reasons import reason_of
from megatron_zpp.config.options import make_parser
from megatron_zpp.config.root import Config

PAGE, MARKER = "guide/megatron_flags.md", "<!-- the site has the table here -->"
MEGATRON_FLAGS = Path(__file__).with_name("megatron_flags.txt").read_text().split()


def current_flags() -> dict[str, str]:
    """The help of every flag of a run, by all of its spellings."""
    found: dict[str, str] = {}
    parts = typing.get_type_hints(Config)
    for action in make_parser("", "", parts)._actions:
        found |= dict.fromkeys(action.option_strings, action.help or "")
    return found


def fate(name: str, current: dict[str, str]) -> tuple[str, str]:
    """What becomes of a flag of Megatron-LM: (status, note). Raises KeyError if nothing is known of it."""
    if name in current:
        (first, *_) = re.split(r"(?<=[a-z)0-9])[.;] ", current[name].replace("%%", "%"))
        return "obeyed", first.rstrip(".").replace("|", "or")
    flag = next((flag for flag in OLD_FLAGS if flag.name == name), None)
    if flag is None:
        if (reason := reason_of(name)) is None:
            raise KeyError(name)
        return "refused" if reason.refused else "no effect", reason.text
    if flag.refused:
        return "refused", flag.otherwise
    if flag.allowed:
        return "one value", f"{' or '.join(f'`{value}`' for value in flag.allowed)}; else: {flag.otherwise}"
    if flag.why:
        return "no effect", flag.why
    return "obeyed", f"as {flag.today}"


def table() -> str:
    """A row for every flag of Megatron-LM, in markdown."""
    current = current_flags()
    rows = [f"| `{name}` | {' | '.join(fate(name, current))} |" for name in sorted(MEGATRON_FLAGS)]
    return "\n".join(["| flag | status | note |", "| --- | --- | --- |", *rows])
