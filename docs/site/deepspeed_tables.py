"""The tables of guide/deepspeed.md: what becomes of each key of DeepSpeed's file and of each old flag."""

from megatron_zpp.config.legacy.deepspeed_keys import KEYS, Idle, Obeyed, Off, Only, Refused, Rule
from megatron_zpp.config.legacy.old_flags import ONLY, RENAMED, RETIRED, OldFlag
from megatron_zpp.config.legacy.reasons import BY_NAME
from megatron_zpp.config.values.json_file import shown

Row = tuple[str, tuple[str, ...]]  # of a key or flag, and what is said of it
PAGE = "guide/deepspeed.md"


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
            "flag", ("possible", "otherwise"), [*map(_bound, ONLY), *_reasons(refused=True)]
        ),
        "retired flags": _table("flag", ("possible", "otherwise"), [_bound(flag) for flag in RETIRED]),
        "idle flags": _table("flag", ("why it has no effect",), _reasons(refused=False)),
    }


def with_tables(text: str) -> str:
    """The page with each table behind its marker."""
    for name, table in tables().items():
        marker = f"<!-- {name} -->"
        if text.count(marker) != 1:
            raise ValueError(f"{PAGE} must have {marker} once, and has it {text.count(marker)} times")
        text = text.replace(marker, table)
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


def _reasons(*, refused: bool) -> list[Row]:
    possible = ("nothing",) if refused else ()
    return [(name, (*possible, reason.text)) for name, reason in BY_NAME.items() if reason.refused is refused]


def _typed(flag: OldFlag) -> str:
    return flag.name if flag.takes is None else f"{flag.name} {flag.name.rsplit('-', 1)[-1].upper()}"


def _bound(flag: OldFlag) -> Row:
    possible = " or ".join(f"`{value}`" for value in flag.allowed) or ("nothing" if flag.refused else "any")
    return flag.name, (possible, flag.otherwise or flag.why)
