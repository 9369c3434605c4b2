"""Translates DeepSpeed's JSON file into the values that current flags would have given."""

import os
from collections.abc import Iterator
from typing import Any

from megatron_zpp.config.legacy.deepspeed_keys import (
    ACCUMULATION,
    BATCH_SIZE,
    KEYS,
    ONLY_PRINTS,
    Idle,
    Obeyed,
    Off,
    Only,
)
from megatron_zpp.config.options import (  # AUTO is Hugging Face's placeholder, too
    AUTO,
    flag_name,
    option_error,
)
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.sources.settings_file import DEEPSPEED_FLAG as FLAG
from megatron_zpp.config.values.json_file import read_json_object, shown, shown_key
from megatron_zpp.config.words import did_you_mean

_FP16_DEFAULTS = {"fp16.loss_scale": 0, "fp16.initial_scale_power": 16}  # others are the same here
_LOSS_SCALE = {  # the fields of flags that the fp16 section replaces, and the defaults of both
    "precision.loss_scale": None,
    "precision.initial_loss_scale": 2.0**16,
    "precision.loss_scale_window": 1000,
    "precision.hysteresis": 2,
    "precision.min_loss_scale": 1.0,
}
_BLOCKS = {path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)}


def obey_file(path: str, provided: Provided, ranks: int, *, under_deepspeed: bool = False) -> tuple[str, ...]:
    """Add the file's settings to `provided`, and keys that are refused; return notes.

    The notes list keys without effect, and flags that have none under DeepSpeed because of the file: its fp16
    section decides the loss scale, and in a script that runs `under_deepspeed` the file decides on clipping.

    Raises ValueError, naming file and key, for a key that is unknown, contradicts `provided` or has a value
    of another kind.
    """
    file = _File(path, provided)
    keys = dict(_flatten(path, read_json_object(FLAG, path)))
    idle = [key for key in keys if isinstance(KEYS[key], Idle)]
    notes = file.settle_16bit(keys) + file.settle_clipping(keys) if under_deepspeed else []
    scale = file.take_loss_scale(keys)
    for key in sorted(keys, key=lambda key: not key.endswith(".enabled")):
        if _is_off(key, keys, provided):
            idle.append(key)
        else:
            file.obey(key, keys[key])
    notes += file.compare_loss_scale(scale)
    file.settle_format(keys)
    file.settle_reports(keys)
    context_ranks = provided.get("distributed.context_parallel_size") or 1  # a flag's or the file's
    file.settle_batch(keys, max(1, ranks // context_ranks))
    if idle:
        notes.append(f"{FLAG} {path}: no effect here: {', '.join(sorted(idle))}")
    return tuple(notes)


class _File:
    """Adds the keys of one file to the provided settings, each with its name."""

    def __init__(self, path: str, provided: Provided) -> None:
        self._path, self._provided = path, provided

    def obey(self, key: str, value: Any) -> None:
        rule = KEYS[key]
        if isinstance(rule, Obeyed):
            try:
                settings = rule.settings(_typed(value, rule.kind))
            except ValueError as error:
                raise self._option_error(key, value, str(error)) from None
            for field_path, setting in settings.items():
                self._put(field_path, setting, key, value)
        elif isinstance(rule, Only):
            if value not in rule.values or isinstance(value, bool) != isinstance(rule.values[0], bool):
                self._refuse(key, value, rule.otherwise)
        elif isinstance(rule, Off):
            if not isinstance(value, dict):
                raise self._option_error(key, value, "must be an object")
            if value.get("enabled") not in (False, None, AUTO):
                self._refuse(f"{key}.enabled", value["enabled"], rule.otherwise)
        elif not isinstance(rule, Idle):
            self._refuse(key, value, rule.otherwise)

    def take_loss_scale(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Let the fp16 section alone decide the loss scale, as DeepSpeed does; return what flags say."""
        fp16 = keys.get("fp16.enabled", self._provided.get("precision.fp16"))
        if fp16 is not True or not any(key.startswith("fp16.") for key in keys):
            return {}
        for key, value in _FP16_DEFAULTS.items():
            keys.setdefault(key, value)
        given = {path: self._provided.get(path) for path in _LOSS_SCALE}
        for path in given:
            self._provided.drop(path)
        return {path: value for path, value in given.items() if value is not None}

    def compare_loss_scale(self, given: dict[str, Any]) -> list[str]:
        """Return a note on flags of the loss scale that say something else than the file."""
        flags = [
            f"{flag_name(path.partition('.')[2])} {value:g}"
            for path, value in given.items()
            if value != (self._provided.get(path) or _LOSS_SCALE[path])
        ]
        if not flags:
            return []
        kind = "constant" if self._provided.get("precision.loss_scale") else "dynamic"
        return [f"{', '.join(flags)}: no effect, as under DeepSpeed: {self._path} has a {kind} loss scale"]

    def settle_16bit(self, keys: dict[str, Any]) -> list[str]:
        """Let the file choose between bf16 and fp16, as DeepSpeed does; return a note on the flag."""
        for own, other in (("bf16", "fp16"), ("fp16", "bf16")):
            if keys.get(f"{own}.enabled") is True and self._provided.get(f"precision.{other}"):
                self._provided.drop(f"precision.{other}")
                return [f"--{other}: no effect, as under DeepSpeed: {self._path} has {own}"]
        return []

    def settle_clipping(self, keys: dict[str, Any]) -> list[str]:
        """Clip gradients only if the file says so, as DeepSpeed does, whatever --clip-grad says."""
        path, key = "optimizer.clip_grad", "gradient_clipping"
        clip, theirs = self._provided.get(path), keys.setdefault(key, 0.0)
        self._provided.drop(path)
        if theirs and clip in (None, theirs):
            return []
        has = f"has {key} {shown(theirs)}" if theirs else "clips no gradient"
        given = f"--clip-grad {clip:g}: no effect, " if clip else ""
        return [f"{given}as under DeepSpeed: {self._path} {has}"]

    def settle_format(self, keys: dict[str, Any]) -> None:
        """Select fp32 if a format is switched off and none is switched on, as DeepSpeed does."""
        formats = ("precision.fp16", "precision.bf16", "precision.fp32")
        off = next((key for key in ("fp16.enabled", "bf16.enabled") if keys.get(key) is False), None)
        if off and not any(map(self._provided.get, formats)):
            self._put("precision.fp32", True, off, False)

    def settle_reports(self, keys: dict[str, Any]) -> None:
        """Combine the two keys of TensorBoard's directory, and fill in the default of W&B's project."""
        if keys.get("tensorboard.enabled") is True:
            name = keys.get("tensorboard.job_name", "DeepSpeedJobName")
            directory = os.path.join(keys.get("tensorboard.output_path", ""), name)
            self._put("logging.tensorboard_dir", directory, "tensorboard", directory)
        if keys.get("wandb.enabled") is True:
            project = keys.get("wandb.project", "deepspeed")
            self._put("logging.wandb_project", project, "wandb.project", project)

    def settle_batch(self, keys: dict[str, Any], ranks: int) -> None:
        """Check batch = micro-batch × accumulation × ranks, or compute the batch size that is missing."""
        batch, micro = (self._provided.get(f"training.{name}_batch_size") for name in ("global", "micro"))
        if ACCUMULATION not in keys and (BATCH_SIZE not in keys or micro is not None):
            return
        if micro == AUTO:
            fix = f"is what --micro-batch-size {AUTO} chooses; omit one of them"
            raise self._option_error(ACCUMULATION, keys[ACCUMULATION], fix)
        steps = int(keys.get(ACCUMULATION, 1))
        if micro is None and batch is not None:
            if batch % (steps * ranks):
                fix = f"must be a multiple of {ACCUMULATION} {steps} × {ranks} data ranks"
                raise self._option_error(self._name("training.global_batch_size"), batch, fix)
            self._put("training.micro_batch_size", batch // (steps * ranks), BATCH_SIZE, batch)
        elif batch is None and micro is not None:
            self._put("training.global_batch_size", micro * steps * ranks, ACCUMULATION, steps)
        elif batch is not None and batch != micro * steps * ranks:
            micros = f"{self._name('training.micro_batch_size')} {micro}"
            fix = f"must be {micro * steps * ranks}, {micros} × {ACCUMULATION} {steps} × {ranks} data ranks"
            fix += "; change one of them or omit it"
            raise self._option_error(self._name("training.global_batch_size"), batch, fix)

    def _name(self, field_path: str) -> str:
        """Return the name that gave a field: a key of this file, without the file's name, or a flag."""
        return self._provided.name(field_path).removeprefix(f"{FLAG} {self._path}: ")

    def _put(self, field_path: str, setting: Any, key: str, value: Any) -> None:
        if key in ONLY_PRINTS and self._provided.get(field_path) is not None:
            return  # what is printed when is no contradiction
        self._provided.put(field_path, setting, f"{FLAG} {self._path}: {key}", shown(value))

    def _refuse(self, key: str, value: Any, reason: str) -> None:
        self._provided.refuse(f"{FLAG} {self._path}: {key} {shown(value)}", reason)

    def _option_error(self, key: str, value: Any, fix: str) -> ValueError:
        return option_error(FLAG, self._path, f"{key} {shown(value)}: {fix}")


def _typed(value: Any, kind: str) -> Any:
    """Return a value of `kind` as a Python object. Raises ValueError for a value of another kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "true or false" and isinstance(value, bool):
        return value
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "a number" and number:
        return float(value)
    if kind == "a whole number" and number and value == int(value):
        return int(value)
    if kind == "a list of two numbers" and isinstance(value, list) and len(value) == 2:
        return tuple(_typed(one, "a number") for one in value)
    raise ValueError(f"must be {kind}")


def _flatten(file: str, values: dict[str, Any], block: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every key that has a rule and a value: `null` and `auto` count as omitted."""
    for name, value in values.items():
        path = f"{block}{name}"
        if path in KEYS and "." not in name:
            if value is not None and not (value == AUTO and isinstance(KEYS[path], Obeyed | Only)):
                yield path, value
        elif path not in _BLOCKS or "." in name:
            raise option_error(FLAG, file, f"{shown_key(path)}: {_unknown(path)}")
        elif isinstance(value, dict):
            yield from _flatten(file, value, f"{path}.")
        elif value is not None:
            raise option_error(FLAG, file, f"{path} {shown(value)}: must be an object")


def _unknown(path: str) -> str:
    known = "docs/guide/deepspeed.md lists the known keys;"
    hint = did_you_mean(path, [*KEYS, *_BLOCKS], 0.6) or known
    return f"is not a known key of DeepSpeed's file; {hint} omit it if it does not matter"


def _is_off(key: str, keys: dict[str, Any], provided: Provided) -> bool:
    """Return whether a key belongs to a number format or logger that is not switched on."""
    block, _, name = key.partition(".")
    if name == "enabled" or isinstance(KEYS[key], Idle):
        return False
    if block in ("fp16", "bf16"):
        return not provided.get(f"precision.{block}")
    return block in ("tensorboard", "wandb") and keys.get(f"{block}.enabled") is not True
