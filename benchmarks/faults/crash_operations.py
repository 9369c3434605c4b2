"""Saves, loads, removals and caches that are cut at each of their calls on files, in one process.

From the call on every call fails, so that the files hold what a kill leaves there; or one call fails, or the
disk is full from it on. Afterwards everything that is committed must be whole, and the same operation must
succeed and leave what it leaves when nothing disturbs it.
"""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.engines import TOKENIZER, save, small, states, train
from benchmarks.faults.injection import FAULTS as DISK_FAULTS
from benchmarks.faults.injection import PART, Calls, Fault
from megatron_zpp.checkpoint.directory import TRACKER, candidates, checkpoint_name, committed, remove_old
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.indexed import IndexedDataset, token_dtype
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.sources import JsonLinesText
from megatron_zpp.native.cache import build_once
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import read_limited

AFTER = 2  # of an errno: every later call fails as well, in calls.c
FAULTS = (("killed at a call", errno.EIO, AFTER), *DISK_FAULTS)


@dataclass(frozen=True)
class Operation:
    """`act` works on a copy of `before`; `whole` says what is not whole after it was cut, or ''.

    `result` is what `act` leaves, without what the next save removes; `hint` what it leaves if nothing fails,
    and may leave as it was otherwise.
    """

    name: str
    before: Path
    act: Callable[[Path], object]
    whole: Callable[[Path], str]
    result: Callable[[Path], Any]
    hint: Callable[[Path], Any] = lambda here: None


Case = Callable[[], tuple[str, str]]  # runs it, and returns the outcome and details


def cases(directory: Path) -> Iterator[tuple[str, Case]]:
    """Every fault at every call of every operation: its name, and what runs it and returns the outcome."""
    calls, here = Calls(), directory / "here"
    for operation in operations(directory):
        _fresh(here, operation)
        calls.arm(here, Fault(PART, 1 << 40))
        operation.act(here)
        number, expected = calls.disarm(), (operation.result(here), operation.hint(here))
        for call in range(1, number + 1):
            for name, what, argument in FAULTS:
                fault = Fault(what, call, argument)
                yield f"{operation.name}: {name}", partial(_case, operation, here, fault, calls, expected)


def _fresh(here: Path, operation: Operation) -> None:
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(operation.before, here)


def _case(
    operation: Operation, here: Path, fault: Fault, calls: Calls, expected: tuple[Any, Any]
) -> tuple[str, str]:
    """Run an operation with a fault, and once more without; returns the outcome and details."""
    _fresh(here, operation)
    error = None
    calls.arm(here, fault)
    try:
        operation.act(here)
    except (OSError, ValueError) as raised:
        error = raised
    except BaseException as other:
        return "another error", repr(other)
    finally:
        calls.disarm()
    if error is not None and ("\n" in str(error) or len(str(error)) > 900):
        return "not one clear line", str(error)
    if fault.what == PART and error is not None:
        return "half a read or write is an error", str(error)
    if problem := operation.whole(here):
        return "damaged", problem
    killed = fault.argument == AFTER  # what comes after the fault is only the end of the process
    if error is None and not killed and (found := operation.result(here)) != expected[0]:
        return "silent", str(found)[:300]
    try:
        operation.act(here)  # the same operation once more, with nothing in its way
    except Exception as other:
        return "fails afterwards", repr(other)
    found = operation.result(here), operation.hint(here)
    if found != expected:
        return "different afterwards", f"{str(found)[:300]} is not {str(expected)[:300]}"
    return ("equal" if error is None else "one line, then equal"), ""


BF16: dict[str, Any] = {"precision": PrecisionConfig(bf16=True)}
ENGINES: dict[str, dict[str, Any]] = {  # of each stage: its settings, by what it is
    "stage 0, fp32": {},
    "stage 1, bf16": BF16 | {"zero_stage": 1},
    "stage 2, fp16": {"precision": PrecisionConfig(fp16=True), "zero_stage": 2},
    "stage 3, bf16": BF16 | {"zero_stage": 3},
    "stage 3, ZeRO++": BF16
    | {"zero_stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
}


def operations(directory: Path) -> Iterator[Operation]:
    """All of them, with the files that they begin with."""
    for number, (name, settings) in enumerate(ENGINES.items()):
        one, two = directory / str(number) / "one", directory / str(number) / "two"
        one.mkdir(parents=True)
        yield from checkpoints(one, two, name, settings)
        if number == 1:
            for make in (_order, _tokens, _token_files, _library):
                before = directory / make.__name__ / "before"
                before.mkdir(parents=True)
                yield make(before)


def checkpoints(one: Path, two: Path, name: str, settings: dict[str, Any]) -> Iterator[Operation]:
    """Save beside others, over one of the same iteration, remove old ones, load.

    `one` is an empty directory, and `two` becomes one with two checkpoints.
    """
    known, engine, other = {}, small(**settings), small(seed=9, **settings)
    for iteration in (1, 2):
        train(engine, seed=iteration)
        save(two, engine, Progress(iteration, iteration))
        known[iteration] = states(engine)
    train(engine, seed=3)
    third = states(engine)

    def read(path: Location) -> list[bytes]:
        load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
        return states(other)

    def whole(allowed: dict[int, list[list[bytes]]], at_least: int, here: Path) -> str:
        there = committed(here)
        for iteration, path in there.items():
            try:
                if read(path) not in allowed.get(iteration, []):
                    return f"{path.name} has other weights"
            except (OSError, ValueError) as error:
                return f"{path.name}: {error}"
        return "" if len(there) >= at_least else f"only {list(there)}"

    def result(here: Path) -> Any:
        return _others(here), {iteration: read(path) for iteration, path in committed(here).items()}

    def tracked(here: Path) -> bytes:
        return read_limited(here / TRACKER, 99)

    def saving(iteration: int, here: Path) -> None:
        save(here, engine, Progress(iteration, iteration), reads_back=True)

    def rotating(here: Path) -> None:
        saving(3, here)
        remove_old(here, 1, None, newest=here / checkpoint_name(3))

    def loading(here: Path) -> None:
        (newest, _) = candidates(str(here))
        if read(newest) != known[2]:
            raise AssertionError("other weights were loaded")

    olds = {iteration: [states] for iteration, states in known.items()}
    yield Operation(
        f"first save, {name}", one, partial(saving, 3), partial(whole, {3: [third]}, 0), result, tracked
    )
    new = partial(whole, olds | {3: [third]}, 2)
    yield Operation(f"save, {name}", two, partial(saving, 3), new, result, tracked)
    over = partial(whole, olds | {2: [known[2], third]}, 2)
    yield Operation(f"save again, {name}", two, partial(saving, 2), over, result, tracked)
    kept = partial(whole, olds | {3: [third]}, 1)
    yield Operation(f"save, {name}, one kept", two, rotating, kept, result, tracked)
    yield Operation(f"load, {name}", two, loading, partial(whole, olds, 2), result)


def _others(here: Path) -> set[str]:
    """What is in a directory of checkpoints besides them, and what the next save does not remove."""
    names = {path.name for path in here.iterdir() if not path.name.endswith((".partial", ".retired"))}
    return names - {path.name for path in committed(here).values()} - {TRACKER}


def _order(before: Path) -> Operation:
    values: dict[str, np.ndarray] = {"a": np.arange(3000), "b": np.arange(77, dtype=np.uint16)}

    def get(here: Path) -> Any:
        config = DataConfig(mock_data=True, data_cache_path=str(here / "cache"))
        cache = OrderCache(config, "", lambda line: None)
        found = cache.get({"indexes": tuple(values)}, values.items, "an order")
        return [found[name][:].tobytes() for name in values]

    def act(here: Path) -> None:
        if get(here) != [array.tobytes() for array in values.values()]:
            raise AssertionError("another order was read")

    return Operation("cached order", before, act, lambda here: "", get)


def _tokens(before: Path) -> Operation:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    lines = "".join(json.dumps({"text": f"{n} {n + 1}"}) + "\n" for n in range(20))
    text = before.with_name("text.jsonl")
    text.write_text(lines)
    source = JsonLinesText("--data-path", "text.jsonl", str(text))
    encoder = partial(Encoder, config, ("text",), True)

    def get(here: Path) -> bytes:
        (here / "tokens").mkdir(exist_ok=True)
        cache = TokenCache(here / "tokens", source, encoder, token_dtype(101), skip=False, workers=0)
        return cache.tokens(np.arange(source.blocks)).tobytes()

    reference = before.with_name("reference")
    reference.mkdir()
    expected = get(reference)

    def act(here: Path) -> None:
        if get(here) != expected:
            raise AssertionError("other tokens were read")

    return Operation("cached tokens", before, act, lambda here: "", get)


def _token_files(before: Path) -> Operation:
    def act(here: Path) -> None:
        with IndexedDatasetWriter(str(here / "x"), "<u2") as writer:
            for length in range(30):
                writer.add_document(list(range(length)))

    def result(here: Path) -> Any:
        return IndexedDataset(here / "x").tokens[:].tobytes(), sorted(path.name for path in here.iterdir())

    def whole(here: Path) -> str:
        """A data set is there as a whole or refused."""
        try:
            return "" if result(here)[0] == expected[0] else "other tokens"
        except (OSError, ValueError):
            return ""

    reference = before.with_name("reference")
    reference.mkdir()
    act(reference)
    expected = result(reference)
    return Operation("token files", before, act, whole, result)


def _library(before: Path) -> Operation:
    content = bytes(range(256)) * 40

    def act(here: Path) -> None:
        build_once(here / "kernel.so", lambda made: made.write_bytes(content), print, wait_seconds=1)

    def whole(here: Path) -> str:
        library = here / "kernel.so"
        return "another library" if library.exists() and library.read_bytes() != content else ""

    def result(here: Path) -> Any:
        return (here / "kernel.so").read_bytes()

    return Operation("compiled library", before, act, whole, result)
