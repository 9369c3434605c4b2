"""Reads a pickle as data: what the file names is never looked up, imported or called.

Of Python's reader, the one that is written in Python, all that would import, call or change objects is
replaced here. A name of a class or function becomes a `Global`, an object of it a `Record` of the name, its
arguments and its state, unless it is plain data or one of `makers` makes it. A pickle that names anything
outside of the libraries that write checkpoints is refused.

A few hundred bytes can copy a value again and again, or make keys that collide. So the length of the pickle
bounds time and memory: it limits opcodes and copied elements. Keys are what models have.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

# Steps are opcodes and copied elements; those that take most memory count more than once. The .metadata of a
# torch_dist checkpoint has 83 steps per block of a tensor, 0.68 per byte.
_FEW_STEPS = 3_000_000  # always allowed; they take some seconds
_MOST_STEPS = 64_000_000  # half a minute, or the .metadata of 500,000 blocks
_LONGEST_NAME = 200  # characters of a class or function with its module
_LONGEST_KEY = 10_000  # characters: equal keys are compared
_MOST_TUPLE_KEYS = 5_000  # hashes of tuples can be made to collide, and then each is compared with all
_LARGEST_KEY = (1 << 61) - 2  # larger whole numbers can be made to collide
_LIBRARIES = (  # whose names may appear, though they are never looked up
    *("torch", "numpy", "collections", "argparse", "enum", "types", "pathlib", "_codecs", "datetime"),
    *("megatron", "deepspeed", "transformer_engine", "apex", "signal"),
)
_BUILTINS = (
    *("set", "frozenset", "bytearray", "complex", "slice", "range", "int", "float", "str", "bool"),
    *("list", "dict", "tuple", "object", "getattr"),
)
_ERRORS = (
    *(pickle.UnpicklingError, EOFError, OverflowError, struct.error),
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
)


class NotData(ValueError):
    """The pickle names code, or is not a whole pickle; the message says which, in one line."""


@dataclass(frozen=True)
class Global:
    """The name of a class or function."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """An object that was not made: the class or function, its arguments, and what was to fill it."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Global, arguments: tuple[Any, ...] = ()) -> None:
        self.of, self.arguments, self.state = of, arguments, None

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


Makers = Mapping[str, Callable[..., Any]]


def read_pickle(content: bytes, persistent: Callable[[Any], Any], makers: Makers | None = None) -> Any:
    """Return the value. `persistent` makes those of persistent ids, `makers` of calls. Raises NotData."""
    try:
        return _Reader(content, persistent, makers or {}).load()
    except NotData:
        raise
    except MemoryError:
        raise NotData("asks for more memory than there is") from None
    except _ERRORS as error:
        reason = " ".join(str(error).split())[:100]
        raise NotData(f"not a whole pickle ({reason or type(error).__name__})") from None


_STEPS = {  # of other opcodes 1
    **dict.fromkeys(pickle.EMPTY_LIST + pickle.EMPTY_DICT, 3),
    **dict.fromkeys(pickle.MARK + pickle.LIST + pickle.DICT + pickle.SETITEM, 2),
    **dict.fromkeys(pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3, 2),
    **dict.fromkeys(pickle.REDUCE + pickle.NEWOBJ + pickle.NEWOBJ_EX, 2),
    **dict.fromkeys(pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE, 2),
    **dict.fromkeys(pickle.EMPTY_SET + pickle.FROZENSET, 8),
}
_REFUSED = (  # they call, take objects of this process, or take long for their length
    *(pickle.INST + pickle.OBJ + pickle.EXT1 + pickle.EXT2 + pickle.EXT4),
    *(pickle.NEXT_BUFFER + pickle.READONLY_BUFFER + pickle.BYTEARRAY8),
    *(pickle.INT + pickle.LONG + pickle.FLOAT + pickle.LONG4),
)
_KEYS = {  # where the stack has the keys that an opcode hashes
    **dict.fromkeys(pickle.DICT + pickle.SETITEMS, slice(None, None, 2)),
    **dict.fromkeys(pickle.FROZENSET + pickle.ADDITEMS, slice(None)),
    **dict.fromkeys(pickle.SETITEM, slice(-2, -1)),
}


def _bounded(code: int, name: str) -> Callable[[Any], None]:
    """Return what does an opcode of the reader's method `name`, if it is within the bounds."""
    steps, keys = _STEPS.get(code, 1), _KEYS.get(code)

    def load(reader: "_Reader") -> None:
        reader.count(steps)
        if keys:
            reader.check_keys(reader.stack[keys])
        getattr(reader, name)()

    return load


def _refuse(reader: Any) -> None:
    raise NotData("has an opcode that no model needs")


class _Reader(pickle._Unpickler):
    stack: list[Any]  # what is above the last mark
    dispatch = {  # noqa: RUF012 - as in the class above
        **{code: _bounded(code, load.__name__) for code, load in pickle._Unpickler.dispatch.items()},
        **dict.fromkeys(_REFUSED, _refuse),
    }

    def __init__(self, content: bytes, persistent: Callable[[Any], Any], makers: Makers) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._persistent = persistent
        self._makers: Makers = {
            "collections.OrderedDict": self._dictionary,
            "builtins.set": self._set,
            "__builtin__.set": self._set,
            "torch.Size": lambda sizes=(): tuple(sizes),
            "_codecs.encode": lambda text, *_: text.encode("latin1"),  # how older protocols write bytes
            **makers,
        }
        self._most_steps = self._left = min(max(len(content), _FEW_STEPS), _MOST_STEPS)
        self._tuple_keys = 0

    def count(self, steps: int) -> None:
        """Count opcodes or copied elements. Raises NotData for more than are allowed."""
        self._left -= steps
        if self._left < 0:
            raise NotData(f"has more than {self._most_steps:,} opcodes and copies of values")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raise NotData for keys that may take for ever to hash or compare: see the constants.

        The hash of nested tuples visits their parts by path, and they may share parts.
        """
        for key in keys:
            if isinstance(key, str | bytes) and len(key) > _LONGEST_KEY:
                raise NotData(f"has a key of more than {_LONGEST_KEY:,} characters, which no model needs")
            if isinstance(key, int) and abs(key) > _LARGEST_KEY:
                raise NotData("has a key of more than 60 bits, which no model needs")
            if isinstance(key, tuple | frozenset):
                self._tuple_keys += 1
                self.count(len(key))
                if self._tuple_keys > _MOST_TUPLE_KEYS:
                    raise NotData(f"has more than {_MOST_TUPLE_KEYS:,} tuples as keys, which no model needs")
                if any(isinstance(part, tuple | frozenset) for part in key):
                    raise NotData("has a nested tuple as a key, which no model needs")
                self.check_keys(key)

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def find_class(self, module: str, name: str) -> Global:
        if len(module) + len(name) > _LONGEST_NAME:
            raise NotData(f"names {module[:40]!r}…, which is longer than {_LONGEST_NAME} characters")
        top = module.split(".")[0]
        if top in _LIBRARIES or (module in ("builtins", "__builtin__") and name in _BUILTINS):
            return Global(module, name)
        shown = f"{module}.{name}"
        shown = shown if shown.isprintable() and len(shown) <= 100 else repr(shown)[:100]
        raise NotData(f"names {shown}, which is code and not a model's data; nothing of it was run")

    def load_reduce(self) -> None:
        arguments, of = self.stack.pop(), self.stack.pop()
        if not isinstance(of, Global) or not isinstance(arguments, tuple):
            raise NotData("calls what is not the name of a class or function")
        make = self._makers.get(str(of))
        if make is None:
            self.stack.append(Record(of, arguments))
        else:
            self.count(len(arguments) + sum(len(each) for each in arguments if isinstance(each, Sized)))
            self.stack.append(make(*arguments))

    load_newobj = load_reduce

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # keywords
        self.load_reduce()

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def _dictionary(self, pairs: Iterable[Any] = ()) -> dict[Any, Any]:
        self.check_keys(key for key, _ in pairs)
        return dict(pairs)

    def _set(self, items: Iterable[Any] = ()) -> set[Any]:
        self.check_keys(items)
        return set(items)
