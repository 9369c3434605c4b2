"""Reads a pickle as data: what the file names is never looked up, imported or called.

`pickletools` cuts the bytes into opcodes, and a stack machine here builds plain values of them. A name of a
class or function becomes a `Global`, an object of it a `Record` of the name, its arguments and its state. A
pickle that names anything outside of the libraries that write checkpoints is refused.

A few hundred bytes can copy a value again and again, or make keys that collide. So the length of the pickle
bounds time and memory: it limits opcodes and copied elements, and copied text. Keys are what models have.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Steps are opcodes and copied elements. Containers and entries of the memo take most memory and count twice.
# The .metadata of a torch_dist checkpoint has 116 steps per block of a tensor, 0.75 per byte.
_FEW_STEPS = 3_000_000  # allowed beside one step per byte; they take some seconds
_MOST_STEPS = 64_000_000  # a minute or two, or the .metadata of 500,000 blocks
_LONGEST_NAME = 200  # characters of a class or function with its module
_LONGEST_KEY = 10_000  # characters: equal keys are compared
_MOST_TUPLE_KEYS = 5_000  # hashes of tuples can be made to collide, and then each is compared with all
_LARGEST_KEY = (1 << 61) - 2  # larger whole numbers can be made to collide
_LONGEST_NUMBER = 2048  # bits
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


class NotData(ValueError):
    """The pickle names code, or is not a whole pickle; the message says which, in one line."""


@dataclass(frozen=True)
class Global:
    """The name of a class or function."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An object that was not made: the class or function, its arguments, and what was to fill it."""

    of: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:  # not what is in it, which may share its parts and be endless in words
        return f"{self.of}(…)"

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an object that has a dictionary of them; empty for others."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(content: bytes, persistent: Callable[[Any], Any]) -> Any:
    """Return the value; `persistent` makes values of persistent ids. Raises NotData."""
    try:
        return _Machine(persistent).run(content)
    except NotData:
        raise
    except MemoryError:
        raise NotData("asks for more memory than there is") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise NotData(f"not a whole pickle ({reason or type(error).__name__})") from None


def _check_name(module: str, name: str) -> Global:
    if len(module) + len(name) > _LONGEST_NAME:
        raise NotData(f"names {module[:40]!r}…, which is longer than {_LONGEST_NAME} characters")
    top = module.split(".")[0]
    if top in _LIBRARIES or (module in ("builtins", "__builtin__") and name in _BUILTINS):
        return Global(module, name)
    shown = f"{module}.{name}"
    shown = shown if shown.isprintable() and len(shown) <= 100 else repr(shown)[:100]
    raise NotData(f"names {shown}, which is code and not a model's data; nothing of it was run")


_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING"),
        *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    )
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TWO_STEPS = frozenset(
    (
        *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT", "FROZENSET", "TUPLE", *_TUPLES),
        *("REDUCE", "NEWOBJ", "NEWOBJ_EX", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    )
)


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._persistent = persistent
        self._steps = self._most_steps = 0  # opcodes, and elements that were copied
        self._text = 0  # characters that may still be copied
        self._tuple_keys = 0

    def run(self, content: bytes) -> Any:
        """Return what the pickle leaves on the stack."""
        self._text = len(content)
        self._most_steps = min(_FEW_STEPS + len(content), _MOST_STEPS)
        for opcode, argument, _ in pickletools.genops(content):
            self._count(2 if opcode.name in _TWO_STEPS else 1)
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise NotData("not a whole pickle (no end)")

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > self._most_steps:
            raise NotData(f"has more than {self._most_steps:,} opcodes and copies of values")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            if type(argument) is int and argument.bit_length() > _LONGEST_NUMBER:
                raise NotData(f"has a number of more than {_LONGEST_NUMBER} bits, which no model needs")
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name not in ("PROTO", "FRAME"):
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        """The opcodes that make containers and objects."""
        stack = self._stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name == "LIST":
            stack.append(self._marked())
        elif name == "DICT":
            stack.append(self._pairs(self._marked()))
        elif name == "FROZENSET":
            stack.append(frozenset(map(self._key, self._marked())))
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._marked()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else self._marked()
            self._extend(items, stack[-1])
        elif name in ("SETITEM", "SETITEMS"):
            entries = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._marked()
            target = stack[-1]
            (target.entries if isinstance(target, Record) else target).update(self._pairs(entries))
        elif name == "PERSID":
            stack.append(self._persistent(argument))
        elif name == "BINPERSID":
            stack.append(self._persistent(stack.pop()))
        else:
            self._name(name, argument)

    def _name(self, name: str, argument: Any) -> None:
        """The opcodes by which an ordinary reader would import and call."""
        stack = self._stack
        if name == "GLOBAL":
            stack.append(_check_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = stack.pop(-2), stack.pop()
            if not isinstance(module, str) or not isinstance(attribute, str):
                raise NotData("not a whole pickle (a name that is no text)")
            stack.append(_check_name(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(self._record(stack.pop(-2), stack.pop()))
        elif name == "NEWOBJ_EX":
            stack.pop()  # keywords
            stack.append(self._record(stack.pop(-2), stack.pop()))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Record):
                stack[-1].state = state
        else:
            raise NotData(f"has the opcode {name}, which no model needs")

    def _marked(self) -> list[Any]:
        """Remove and return what is above the last mark."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise NotData("not a whole pickle (no mark)")

    def _record(self, of: Any, arguments: Any) -> Any:
        """Return an inert object; dictionaries, sets, sizes and bytes are made, as they are data."""
        if not isinstance(of, Global) or not isinstance(arguments, tuple):
            raise NotData("calls what is not the name of a class or function")
        if str(of) == "collections.OrderedDict":
            pairs = self._copied(arguments)
            if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
                raise NotData("not a whole pickle (a dictionary of other than pairs)")
            return self._pairs([part for pair in pairs for part in pair])
        if of.name == "set" and of.module in ("builtins", "__builtin__"):
            return set(map(self._key, self._copied(arguments)))
        if str(of) == "torch.Size":
            return tuple(self._copied(arguments))
        if str(of) == "_codecs.encode" and isinstance(arguments[0], str):  # how older protocols write bytes
            self._text -= len(arguments[0])
            if self._text < 0:
                raise NotData("copies more text than it has, which no model needs")
            return arguments[0].encode("latin1")
        return Record(of, arguments)

    def _copied(self, arguments: tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        """Return the sequence that is the first argument, if there is one. It counts as read once more."""
        found = arguments[0] if arguments else ()
        if not isinstance(found, list | tuple):
            raise NotData("not a whole pickle (a container of other than a sequence)")
        self._count(len(found))
        return found

    def _extend(self, items: list[Any], target: Any) -> None:
        if isinstance(target, Record):
            target.items.extend(items)
        elif isinstance(target, set):
            target.update(map(self._key, items))
        else:
            target.extend(items)

    def _pairs(self, flat: list[Any]) -> dict[Any, Any]:
        return dict(zip(map(self._key, flat[::2]), flat[1::2], strict=True))

    def _key(self, key: Any) -> Any:
        """Return a key. Raises NotData for one that may take for ever to hash or compare: see the constants.

        The hash of nested tuples visits their parts by path, and they may share parts.
        """
        if isinstance(key, str | bytes) and len(key) > _LONGEST_KEY:
            raise NotData(f"has a key of more than {_LONGEST_KEY:,} characters, which no model needs")
        if isinstance(key, int) and abs(key) > _LARGEST_KEY:
            raise NotData("has a key of more than 60 bits, which no model needs")
        if isinstance(key, tuple | frozenset):
            self._tuple_keys += 1
            self._count(len(key))
            if self._tuple_keys > _MOST_TUPLE_KEYS:
                raise NotData(f"has more than {_MOST_TUPLE_KEYS:,} tuples as keys, which no model needs")
            for part in key:
                if isinstance(part, tuple | frozenset):
                    raise NotData("has a nested tuple as a key, which no model needs")
                self._key(part)
        return key
