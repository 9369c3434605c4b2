"""Translates flags of other programs into the values that current flags would have given."""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron_zpp.config.legacy.old_flags import (
    OLD_FLAGS,
    OTHER_VALUES,
    REFUSED_VALUES,
    RETIRED_VALUES,
    VALUE,
)
from megatron_zpp.config.legacy.reasons import EXPERTS, NO_TABLE, Reason, reason_of
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import (
    AUTO,
    UsageError,
    accepted,
    flag_name,
    is_read,
    option_error,
    parse_known,
    reader,
)
from megatron_zpp.config.sources.provided import OTHERS, Provided

PIPELINE = "--pipeline-model-parallel-size"
_MICRO, _GLOBAL = "training.micro_batch_size", "training.global_batch_size"
_BY_NAME = {flag.name: flag for flag in OLD_FLAGS}
_EXPERTS, _DENSE = ("--num-experts", "--num-experts-switch"), "the model has no experts"
_OF_ROPE = ("--position-embedding-type", "rope"), ("--use-rotary-position-embeddings", "")
_ROPE = "with --position-embedding-type rope there is no table of positions"
_REFUSED_VALUES = REFUSED_VALUES | {
    flag_name(field): {old: f"is retired; use {new}" for old, new in values.items()}
    for field, values in RETIRED_VALUES.items()
}


class Translation:
    """What becomes of the flags of one command line that are not current ones.

    `typed` has the values of all flags, by group and field. `unknown` says which words mean nothing.
    """

    def __init__(self, parser: argparse.ArgumentParser, groups: Sequence[str], argv: Sequence[str]) -> None:
        """Parse `argv`. Raises UsageError for a flag without its value."""
        add_old_flags(parser)
        self._renamed: list[str] = []
        self._idle: dict[str, list[str]] = {}  # flags by the reason
        self._refused: list[tuple[str, str]] = []  # words, reason
        given = [(name, " ".join(values)) for name, values, _ in _flags(argv)]
        self._given = {name for name, _ in given}
        self._excused: dict[str, str] = {}  # why refused flags have no effect here, by why they are refused
        if not any(name in _EXPERTS and set(values.split()) - {"0", "1"} for name, values in given):
            self._excused[EXPERTS] = _DENSE
        if any(each in given for each in _OF_ROPE):
            self._excused[NO_TABLE] = _ROPE
        words = [word for flag in _flags(argv) for word in self._obeyed(parser, *flag)]
        try:
            self.typed, self.unknown = parse_known(parser, (*groups, OTHERS), words)
        except UsageError as error:
            refused = Provided({}, {})
            self._refuse(refused)
            raise UsageError(refused.explain(str(error))) from None
        self._old, self.pipeline = self.typed[OTHERS], 1

    def gives(self, *names: str) -> bool:
        """Whether one of some flags is given."""
        return any(name in self._given for name in names)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line on the flags that have another name here, and one on those without effect."""
        idle = "; ".join(f"{', '.join(names)}: {why}" for why, names in self._idle.items())
        lines = (f"translated: {'; '.join(self._renamed)}", f"no effect here: {idle}")
        return tuple(line for line, any_of in zip(lines, (self._renamed, idle), strict=True) if any_of)

    def obey(self, provided: Provided) -> None:
        """Add the values of old flags to `provided`, and the flags and values that are refused."""
        self._refuse(provided)
        for name, value in tuple(self._old.items()):
            flag, words = _BY_NAME[name], _words(name, value)
            if not is_read(value, flag.takes):
                del self._old[name]
                provided.lack(flag.gives)
                provided.explain(str(option_error(name, value, f"must be {accepted(flag.takes)}")))
            elif name == PIPELINE and value < 1:
                provided.explain(str(option_error(name, value, "must be at least 1")))
            elif name == PIPELINE:
                self.pipeline = value
            elif not flag.accepts(value):
                provided.refuse(words, flag.otherwise)
            elif flag.means and value not in flag.means:
                provided.lack(path for given in flag.means.values() for path in given)
                provided.refuse(words, f"must be {' or '.join(flag.means)}")
            else:
                with provided.collected():
                    for field_path, setting in (flag.means[value] if flag.means else flag.gives).items():
                        provided.put(field_path, value if setting is VALUE else setting, name, _shown(value))
                    if flag.why:
                        self._idle.setdefault(flag.why, []).append(name)
                    elif flag.today:
                        self._renamed.append(f"{name} is {flag.today}")

    def settle(self, provided: Provided) -> None:
        """Apply lower bounds and lengths in tokens, after all other values.

        Raises ValueError for contradictions.
        """
        for name, value in self._old.items():
            if path := _BY_NAME[name].samples:
                samples = round(value / ModelConfig(**provided.values["model"]).seq_length)
                if samples < 1:
                    raise option_error(name, value, "must be a sample of --seq-length tokens, or more")
                provided.put(path, samples, name, value)
            for field_path, least in _BY_NAME[name].at_least.items():
                value = provided.get(field_path)
                if value is None:
                    provided.put(field_path, least, name)
                elif value != AUTO and value < least:
                    raise option_error(
                        name, "(given)", f"contradicts {provided.name(field_path)} {value}; omit one"
                    )

    def _obeyed(
        self, parser: argparse.ArgumentParser, name: str, values: list[str], words: list[str]
    ) -> list[str]:
        """Return the words to parse in place of those of a flag, and record what becomes of the flag."""
        flag, reason = _BY_NAME.get(name), None
        if flag is not None and flag.refused:
            reason = Reason(flag.otherwise, refused=True)
        elif name not in parser._option_string_actions:
            reason = reason_of(name)
        if reason is not None:
            excuse = self._excused.get(reason.text) if reason.refused else reason.text
            if excuse is None:
                self._refused.append((_words(name, values), reason.text))
            else:
                self._idle.setdefault(excuse, []).append(name)
            return [] if reason.takes_values else values
        (first, *_) = values or [""]
        if why := _REFUSED_VALUES.get(name, {}).get(first):
            self._refused.append((f"{name} {first}", why))
            return []
        if other := OTHER_VALUES.get(name, {}).get(first):
            self._renamed.append(f"{name} {first} is {other}")
            return [name, other, *values[1:]]
        return words

    def _refuse(self, provided: Provided) -> None:
        for words, reason in self._refused:
            provided.refuse(words, reason, flag=words.partition(" ")[0])


def divide_batch(provided: Provided, stages: int, data_ranks: int) -> tuple[str, ...]:
    """Choose the micro-batch of `data_ranks` ranks, those of the pipeline's `stages` included.

    The global batch and its ramp, and so the samples of every update, stay; the default is that of the other
    program. The micro-batch stays too if it divides them; else it becomes the largest of its divisors that
    does. Returns a note on that. Raises ValueError if there is none.
    """
    micro: Any = provided.get(_MICRO)
    if micro in (None, AUTO) or micro < 1:
        return ()
    batch = provided.get(_GLOBAL) or micro * max(1, data_ranks // stages)
    sizes = [batch, *(provided.get("training.rampup_batch_size") or ())[:2]]
    if any(size < 1 or size % data_ranks for size in sizes):
        fix = (
            f"its ranks would be data ranks, and {data_ranks} of them do not divide the batch of "
            f"{', '.join(map(str, sizes))} samples; start fewer ranks, or raise --tensor-model-parallel-size"
        )
        raise option_error(PIPELINE, stages, fix)
    kept = math.gcd(micro, math.gcd(*sizes) // data_ranks)
    if kept == micro:
        return ()
    provided.values["training"] |= {"micro_batch_size": kept, "global_batch_size": batch}
    same = f"with the same {batch} samples in an update"
    return (f"{PIPELINE} {stages}: --micro-batch-size {micro} becomes {kept}, {same}",)


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Add old flags that may be obeyed to a parser, hidden from its help, in the group `OTHERS`."""
    parser.add_argument("--deepspeed-config", dest="deepspeed.deepspeed_config", help=argparse.SUPPRESS)
    hidden = parser.add_argument_group()  # a parser formats the help of each flag that is added to itself
    for name, flag in _BY_NAME.items():
        if flag.refused:
            continue
        details: dict[str, Any] = {"type": reader(flag.takes)} if flag.takes else {"action": "store_true"}
        details |= {"nargs": "+"} if flag.many else {}
        hidden.add_argument(name, dest=f"{OTHERS}.{name}", help=argparse.SUPPRESS, **details)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (name, values, all words) of each flag; what stands before the first has the name ''."""
    starts = [place for place, word in enumerate(argv) if word.startswith("--")]
    for start, stop in pairwise((*({0} - {*starts[:1]}), *starts, len(argv))):
        words = [*argv[start:stop]]
        name, joined, value = words[0].partition("=") if words[0].startswith("--") else ("", "", "")
        yield name, [value] * bool(joined) + words[bool(name) :], words


def _words(name: str, value: Any) -> str:
    values = value if isinstance(value, list | tuple) else () if value is True else (value,)
    return " ".join((name, *map(str, values)))


def _shown(value: Any) -> Any:
    return "(given)" if value is True else value
