"""Saves and loads what a run needs to go on: safetensors for tensors, JSON for the rest, never pickle.

A checkpoint is a directory `iter_0000100/` with
  weights.safetensors   fp32 master weights by the model's parameter names
  moments.safetensors   `exp_avg/NAME` and `exp_avg_sq/NAME`; absent with --no-save-optim
  errors.safetensors    what each rank's quantised sums lost, by unit; with error feedback alone
  state.json            position, optimizer step, loss scale, configuration, tokenizer
and `latest_checkpointed_iteration.txt` beside it names the newest one.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_zpp.config.options import refusal
from megatron_zpp.storage.files import commit_directory, write_text
from megatron_zpp.zero.engine import MOMENTS, STATE_KINDS, WEIGHTS, ZeroEngine

FORMAT_VERSION = 1
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Dropout and data order follow from the seed and these counts."""

    iteration: int = 0
    consumed_samples: int = 0


def save_checkpoint(
    directory: str,
    engine: ZeroEngine,
    progress: Progress,
    *,
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    with_optimizer: bool,
) -> Path:
    """Writes the checkpoint of `progress` from rank 0; every rank must call it, since shards are gathered."""
    kinds = STATE_KINDS if with_optimizer and engine.optimizer_steps else (WEIGHTS,)
    tensors = {kind: _on_first_rank(engine, engine.states(kind)) for kind in kinds}
    errors = _on_first_rank(engine, engine.errors()) if with_optimizer else {}
    loss_scale, steps = engine.loss_scale.state(), engine.optimizer_steps
    final = Path(directory) / f"iter_{progress.iteration:07d}"
    partial = final.with_name(f"{final.name}.partial")
    if engine.topology.rank != 0:
        return final
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tensors(partial / "weights.safetensors", tensors.pop(WEIGHTS))
    moments = {f"{kind}/{name}": tensor for kind in tensors for name, tensor in tensors[kind].items()}
    if moments:
        _write_tensors(partial / "moments.safetensors", moments)
    if errors:
        _write_tensors(partial / "errors.safetensors", errors)
    state = {
        "format_version": FORMAT_VERSION,
        "progress": asdict(progress),
        "optimizer_steps": steps,
        "error_layout": engine.error_layout,
        "loss_scale": loss_scale,
        "tokenizer": tokenizer,
        "config": config,
    }
    (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    commit_directory(partial, final)
    write_text(Path(directory) / TRACKER, f"{progress.iteration}\n")
    return final


def find_checkpoint(directory: str, iteration: int | None = None) -> Path | None:
    """The checkpoint of `iteration`, or the one that the tracker names; None when the directory has none.

    Raises ValueError for an iteration that is not there and for a tracker that does not fit.
    """
    root = Path(directory)
    saved = sorted(path for path in root.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name))
    if iteration is not None:
        chosen = root / f"iter_{iteration:07d}"
        if chosen not in saved:
            there = ", ".join(str(int(path.name[5:])) for path in saved) or "none"
            raise refusal("--ckpt-step", iteration, f"not in {directory}; iterations there: {there}")
        return chosen
    tracker = root / TRACKER
    if not tracker.exists():
        if saved:
            raise refusal("--load", directory, f"{TRACKER} is missing; name one with --ckpt-step")
        return None
    text = tracker.read_text(errors="replace").strip()
    chosen = root / f"iter_{int(text):07d}" if text.isdecimal() else None
    if chosen not in saved:
        raise refusal("--load", directory, f"{TRACKER} says {text!r}, which is no checkpoint there")
    return chosen


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The contents of state.json. Raises ValueError when it is damaged or of another version."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
        version = state["format_version"]
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; {checkpoint} is not a checkpoint of megatron_zpp") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the state of a checkpoint ({error})") from None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {version}; this program reads {FORMAT_VERSION}")
    return state


@contextmanager
def open_tensors(path: Path, expected: dict[str, tuple[int, ...]]) -> Iterator[safe_open]:
    """A safetensors file, memory-mapped on the CPU, that holds tensors of just these names and shapes.

    Raises ValueError, naming the file, when it is missing or damaged or holds other ones.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(expected.keys() ^ set(file.keys())):
                where = "missing from the file" if name in expected else "not part of this model"
                raise ValueError(f"{path}: {name} is {where}; use the model flags that it was saved with")
            for name, shape in expected.items():
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    raise ValueError(f"{path}: {name} has shape {found}, this model needs {shape}")
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def load_checkpoint(
    checkpoint: Path, engine: ZeroEngine, tokenizer: dict[str, Any], *, with_optimizer: bool
) -> Progress:
    """Puts a checkpoint's states into the engine. Raises ValueError when model or tokenizer differ."""
    state = read_state(checkpoint)
    if state["tokenizer"] != tokenizer:
        raise ValueError(
            f"{checkpoint}: was trained with {_shown(state['tokenizer'])}, "
            f"this run has {_shown(tokenizer)}; give the tokenizer flags of that run"
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in engine.model.named_parameters()}
    with open_tensors(checkpoint / "weights.safetensors", shapes) as weights:
        engine.load_states(WEIGHTS, weights.get_tensor)
    if with_optimizer:
        engine.loss_scale.load_state(state["loss_scale"])
        if state["optimizer_steps"]:
            _load_moments(checkpoint / "moments.safetensors", engine, shapes)
            engine.load_optimizer_steps(state["optimizer_steps"])
        if keeps_errors(state, engine):
            ranks = engine.topology.world_size
            shapes = {f"unit_{i}": (ranks, unit.error.numel()) for i, unit in enumerate(engine.units)}
            with open_tensors(checkpoint / "errors.safetensors", shapes) as errors:
                engine.load_errors(errors.get_tensor)
    return Progress(**state["progress"])


def _load_moments(path: Path, engine: ZeroEngine, shapes: dict[str, tuple[int, ...]]) -> None:
    if not path.exists():
        raise ValueError(f"{path}: missing (saved with --no-save-optim); add --no-load-optim")
    expected = {f"{kind}/{name}": shape for kind in MOMENTS for name, shape in shapes.items()}
    with open_tensors(path, expected) as moments:
        for kind in MOMENTS:
            engine.load_states(kind, lambda name, kind=kind: moments.get_tensor(f"{kind}/{name}"))


def keeps_errors(state: dict[str, Any], engine: ZeroEngine) -> bool:
    """Whether error feedback goes on where it was: what was lost fits the same ranks and blocks alone."""
    return engine.feeds_back and state.get("error_layout") == engine.error_layout


def _on_first_rank(engine: ZeroEngine, gathered: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """What is gathered, in CPU memory, on rank 0; other ranks help to gather it."""
    first = engine.topology.rank == 0
    return {name: tensor.cpu().clone() for name, tensor in gathered if first}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes for the owner alone, umask or not


def _shown(tokenizer: dict[str, Any]) -> str:
    short = str(tokenizer.get("fingerprint", ""))[:12]
    return f"{tokenizer.get('tokenizer_type')} of {tokenizer.get('vocab_size')} entries ({short})"
