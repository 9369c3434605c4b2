"""Builds tables of docs/guide/ from the code; `python -m tests.config.tables` writes them.

deepspeed.md has the keys of DeepSpeed's file and old flags; megatron_flags.md has a row for every flag of
Megatron-LM's parser, whose names are in megatron_flags.txt.
"""

import re
import typing
from pathlib import Path

from megatron_zpp.config.json_file import shown
from megatron_zpp.config.legacy.deepspeed_keys import KEYS, Idle, Obeyed, Off, Only, Refused, Rule
from megatron_zpp.config.legacy.megatron_features import feature_flag
from megatron_zpp.config.legacy.old_flag import OldFlag
from megatron_zpp.config.legacy.old_flags import IDLE, OLD_FLAGS, ONLY, REFUSED, RENAMED, RETIRED
from megatron_zpp.config.options import make_parser
from megatron_zpp.config.root import Config

Row = tuple[str, tuple[str, ...]]  # of a key or flag, and what is said of it
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGE, MEGATRON_PAGE = GUIDE / "deepspeed.md", GUIDE / "megatron_flags.md"
MEGATRON_FLAGS = Path(__file__).with_name("megatron_flags.txt").read_text().split()


def tables() -> dict[str, str]:
    """Markdown by the name of the marker before it."""
    return {
        "obeyed keys": _table("key", ("current flag",), _of(Obeyed)),
        "bound keys": _table("key", ("possible", "otherwise"), _of(Only, Off, Refused)),
        "idle keys": _table("key", ("why it cannot matter",), _of(Idle)),
        "renamed flags": _table(
            "old flag", ("current flag",), [(_typed(flag), (flag.today,)) for flag in RENAMED]
        ),
        "bound flags": _table(
            "flag", ("possible", "otherwise"), [_bound(flag) for flag in (*ONLY, *REFUSED)]
        ),
        "retired flags": _table("flag", ("possible", "otherwise"), [_bound(flag) for flag in RETIRED]),
        "idle flags": _table("flag", ("why it has no effect",), [(flag.name, (flag.why,)) for flag in IDLE]),
    }


def current_flags() -> dict[str, str]:
    """The help of every flag of a run, by all of its spellings."""
    found = {}
    parts = typing.get_type_hints(Config)
    for action in make_parser("", "", parts)._actions:
        found |= dict.fromkeys(action.option_strings, action.help or "")
    return found


def fate(name: str, current: dict[str, str]) -> tuple[str, str]:
    """What becomes of a flag of Megatron-LM: (status, note). Raises KeyError if nothing is known of it."""
    if name in current:
        (first, *_) = re.split(r"(?<=[a-z)0-9])[.;] ", current[name].replace("%%", "%"))
        return "obeyed", first.rstrip(".").replace("|", "or")
    flag = next((flag for flag in OLD_FLAGS if flag.name == name), None) or feature_flag(name)
    if flag is None:
        raise KeyError(name)
    if flag.refused:
        return "refused", flag.otherwise
    if flag.allowed:
        return "one value", f"{' or '.join(f'`{value}`' for value in flag.allowed)}; else: {flag.otherwise}"
    if flag.needs:
        return "no effect", f"{flag.why}; refused with another value: {flag.otherwise}"
    if flag.why:
        return "no effect", flag.why
    return "obeyed", f"as {flag.today}"


def megatron_table() -> str:
    """A row for every flag of Megatron-LM."""
    current = current_flags()
    rows = [f"| `{name}` | {' | '.join(fate(name, current))} |" for name in sorted(MEGATRON_FLAGS)]
    return "\n".join(["| flag | status | note |", "| --- | --- | --- |", *rows])


def page(text: str, tables: dict[str, str]) -> str:
    """A page with the tables as they must be, each behind its marker."""
    for name, table in tables.items():
        marker = f"<!-- {name} -->\n"
        assert text.count(marker) == 1, marker
        text = re.sub(rf"{marker}(\|.*\n)*", lambda _, put=f"{marker}{table}\n": put, text)
    return text


def _table(name: str, titles: tuple[str, ...], rows: list[Row]) -> str:
    """Names with the same description share a line."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for one, said in rows:
        merged.setdefault(said, []).append(f"`{one}`")
    cells = [(name, *titles), ("---",) * (1 + len(titles))]
    cells += [(", ".join(names), *said) for said, names in merged.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _of(*kinds: type) -> list[Row]:
    return [(key, _said(rule)) for key, rule in KEYS.items() if isinstance(rule, kinds)]


def _said(rule: Rule) -> tuple[str, ...]:
    if isinstance(rule, Obeyed):
        return (rule.flag,)
    if isinstance(rule, Idle):
        return (rule.why,)
    if isinstance(rule, Only):
        return " or ".join(f"`{shown(value)}`" for value in rule.values), rule.otherwise
    return "off" if isinstance(rule, Off) else "nothing", rule.otherwise


def _typed(flag: OldFlag) -> str:
    return flag.name if flag.takes is None else f"{flag.name} {flag.name.rsplit('-', 1)[-1].upper()}"


def _bound(flag: OldFlag) -> Row:
    return flag.name, (" or ".join(f"`{value}`" for value in flag.allowed) or "nothing", flag.otherwise)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), tables()))
    MEGATRON_PAGE.write_text(page(MEGATRON_PAGE.read_text(), {"megatron flags": megatron_table()}))
