"""Reads a pickle as data: what the file names is never looked up, imported or called.

Python's reader asks `find_class` for what a pickle names, and calls what it gets ("Restricting Globals" in
the manual of `pickle`). Here it always gets an inert class that this file makes, whose objects keep what they
were to be made of, or are plain data. A pickle that names anything outside of the libraries that write
checkpoints is refused. How much memory a pickle takes is not bounded.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST_NAME = 200  # characters of a class or function with its module
_LIBRARIES = (  # whose names may appear, though they are never looked up
    *("torch", "numpy", "collections", "argparse", "enum", "types", "pathlib", "_codecs", "datetime"),
    *("megatron", "deepspeed", "transformer_engine", "apex", "signal"),
)
_BUILTINS = frozenset(
    (
        *("set", "frozenset", "bytearray", "complex", "slice", "range", "int", "float", "str", "bool"),
        *("list", "dict", "tuple", "object", "getattr"),
    )
)
_ERRORS = (
    *(pickle.UnpicklingError, EOFError, OverflowError, RecursionError),
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
)


class NotData(ValueError):
    """The pickle names code, or is not a whole pickle; the message says which, in one line."""


class Sealed:
    """An object that a pickle cannot fill with other values."""

    def __setstate__(self, state: Any) -> None:
        raise NotData("changes a value that it has read, which no model needs")


class Record:
    """An object that was not made. Its class is that of one name; the class itself stands for the name."""

    of = ""  # the class or function with its module
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        """Keep the arguments; `__setstate__` sets the state."""
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an entry: no setting of a model is in one."""

    def extend(self, items: Any) -> None:
        """Drop items, as above."""

    append = add = extend

    def __repr__(self) -> str:  # not what is in it, which may share its parts and be endless in words
        return f"{self.of}(…)"

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an object that has a dictionary of them; empty for others."""
        return self.state if isinstance(self.state, dict) else {}


class _OrderedDict(dict):
    """A dictionary, whose attributes (`_metadata` of a module's state) are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


Makers = Mapping[str, Callable[..., Any]]
_PLAIN: Makers = {
    "collections.OrderedDict": _OrderedDict,
    "builtins.set": set,
    "__builtin__.set": set,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "_codecs.encode": lambda text, *_: text.encode("latin1"),  # how older protocols write bytes
}


def read_pickle(content: bytes, persistent: Callable[[Any], Any], makers: Makers | None = None) -> Any:
    """Return the value; `persistent` makes values of persistent ids, `makers` those of calls by name.

    Raises NotData.
    """
    try:
        return _Reader(content, persistent, {**_PLAIN, **(makers or {})}).load()
    except NotData:
        raise
    except MemoryError:
        raise NotData("asks for more memory than there is") from None
    except _ERRORS as error:
        reason = " ".join(str(error).split())[:100]
        raise NotData(f"not a whole pickle ({reason or type(error).__name__})") from None


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, persistent: Callable[[Any], Any], makers: Makers) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._persistent, self._makers = persistent, makers

    def persistent_load(self, value: Any) -> Any:
        return self._persistent(value)

    def find_class(self, module: str, name: str) -> type[Record]:
        of = _checked(module, name)
        found: dict[str, Any] = {"of": of}
        if make := self._makers.get(of):
            found["__new__"] = lambda cls, *arguments: make(*arguments)
        return type(of, (Record,), found)


def _checked(module: str, name: str) -> str:
    if len(module) + len(name) > _LONGEST_NAME:
        raise NotData(f"names {module[:40]!r}…, which is longer than {_LONGEST_NAME} characters")
    shown = f"{module}.{name}"
    if module.split(".")[0] in _LIBRARIES or (module in ("builtins", "__builtin__") and name in _BUILTINS):
        return shown
    shown = shown if shown.isprintable() and len(shown) <= 100 else repr(shown)[:100]
    raise NotData(f"names {shown}, which is code and not a model's data; nothing of it was run")
