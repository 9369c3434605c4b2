"""What is known of a flag that is not a current flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.config.options import flag_name


@dataclass(frozen=True, kw_only=True)
class OldFlag:
    """One flag, which takes one value of the type `takes`, or no value if that is None.

    many       whether it takes one value or more
    gives      the values that it sets, by field path; VALUE stands for the value typed
    at_least   lower bounds that it asks for, by field path
    samples    the field path that has its value divided by --seq-length
    means      what it gives for each of its values, instead of `gives`
    today      the current flag with the same meaning
    allowed    the values that it may have, which describe what happens anyway
    otherwise  why another value is refused, or what to do instead; without `allowed` values any is refused
    why        the reason why the flag has no effect
    needs      the settings, by field path, that it has no effect with; with others it is refused
    computes   whether saved settings may have only `allowed` values of it too: the model depends on it
    """

    name: str
    takes: type | None = None
    many: bool = False
    gives: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, int] = field(default_factory=dict)
    samples: str = ""
    means: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    today: str = ""
    allowed: tuple[Any, ...] = ()
    why: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)
    otherwise: str = ""
    computes: bool = False

    def check_saved(self, place: str, value: Any) -> None:
        """Raise ValueError, naming `place`, for saved settings of a model that no longer exists."""
        if self.computes and value not in (None, *self.allowed):
            raise ValueError(f"{place} {value}: {self.otherwise}")

    def accepts(self, value: Any) -> bool:
        """Whether `value` is one that the flag may have, with each of several values."""
        return not self.allowed or all(one in self.allowed for one in (value if self.many else (value,)))

    @property
    def refused(self) -> bool:
        """Whether the flag is refused with any value."""
        return bool(self.otherwise) and not self.allowed and not self.needs


VALUE = object()


def renamed(name: str, field_path: str, takes: type | None = None) -> OldFlag:
    """A flag whose current name is that of a field."""
    today, value = flag_name(field_path.partition(".")[2]), True if takes is None else VALUE
    return OldFlag(name=name, takes=takes, gives={field_path: value}, today=today)


_TYPES = {"": None, "int": int, "float": float, "str": str}


def idle(names_by_reason: Mapping[str, str]) -> tuple[OldFlag, ...]:
    """Flags without effect here, by the reason: `--flag`, `--flag:int` has a value, `--flag:ints` several."""
    found = []
    for why, names in names_by_reason.items():
        for name, _, kind in (word.partition(":") for word in names.split()):
            takes, many = _TYPES[kind.removesuffix("s")], kind.endswith("s")
            found.append(OldFlag(name=name, takes=takes, many=many, why=why))
    return tuple(found)


def only(name: str, allowed: Any, otherwise: str, today: str = "", *, many: bool = False) -> OldFlag:
    """A flag that may have the `allowed` values only, or a single one."""
    values = allowed if isinstance(allowed, tuple) else (allowed,)
    return OldFlag(
        name=name, takes=type(values[0]), many=many, allowed=values, otherwise=otherwise, today=today
    )


def refused(names_by_reason: Mapping[str, str]) -> tuple[OldFlag, ...]:
    """Flags that are refused with any value, by why, or by what to do instead."""
    return tuple(
        OldFlag(name=name, otherwise=otherwise)
        for otherwise, names in names_by_reason.items()
        for name in names.split()
    )


def retired(name: str, value: Any, why: str, otherwise: str = "", *, computes: bool = False) -> OldFlag:
    """A flag of an earlier version that may only have one `value`, or none if that is a type."""
    takes, allowed = (value, ()) if isinstance(value, type) else (type(value), (value,))
    otherwise = otherwise or f"{why}; omit it"
    return OldFlag(name=name, takes=takes, allowed=allowed, why=why, otherwise=otherwise, computes=computes)
