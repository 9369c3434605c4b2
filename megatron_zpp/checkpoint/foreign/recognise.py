"""Recognises directories that other programs wrote, from names of files alone; nothing of them is read."""

import re
from dataclasses import dataclass
from pathlib import Path

MEGATRON, DEEPSPEED, TRANSFORMERS = "megatron", "deepspeed", "transformers"
TORCH = "torch.distributed.checkpoint"  # of torchtitan, and of loops with FSDP2
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
_LIMIT = 64  # bytes of a tracker
_ITERATION = re.compile(r"(?:iter_|global_step|step-)(\d+)(_universal)?|release()")


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program: `path` is an iteration's directory."""

    program: str  # MEGATRON, DEEPSPEED, TRANSFORMERS or TORCH
    layout: str  # one of _LAYOUTS
    path: Path
    iteration: int | None = None

    @property
    def words(self) -> str:
        """What wrote it, and where."""
        program = {MEGATRON: "Megatron-LM", DEEPSPEED: "DeepSpeed"}.get(self.program, self.program)
        return f"{self.path.name} is a checkpoint of {program} ({_LAYOUTS[self.layout]})"

    @property
    def remedy(self) -> str:
        """How to use it here."""
        if self.program == TORCH:
            return (
                "save its weights in Hugging Face's format, as safetensors with a config.json; then "
                "megatron-zpp import makes a checkpoint of this program from them"
            )
        direct = f"hf:{self.path} names it as it is, and " if self.layout == "safetensors" else ""
        return f"{direct}megatron-zpp import makes a checkpoint of this program from it"


_LAYOUTS = {
    "torch_dist": "distributed, with metadata.json",
    "mp_rank": "mp_rank files",
    "zero": "ZeRO files",
    "universal": "Universal",
    "safetensors": "safetensors",
    "pickled": "pytorch_model.bin",
    "dcp": ".distcp files",
}


def recognise(directory: Path) -> Foreign | None:
    """Return what another program has in `directory`, the newest iteration; None if nothing is recognised.

    `directory` is an iteration's, or holds those of several.
    """
    if not directory.is_dir():
        return None
    if found := _layout(directory):
        return found
    named = [directory / name for tracker in _TRACKERS if (name := _tracked(directory / tracker))]
    inside = [path for path in directory.iterdir() if _ITERATION.fullmatch(path.name) and path.is_dir()]
    inside.sort(key=lambda path: _number(path) or 0, reverse=True)
    for path in (*named, *inside):
        if path.is_dir() and (found := _layout(path)):
            return found
    return None


def _layout(path: Path) -> Foreign | None:
    """Return what an iteration's directory is, by the files that only that program writes."""
    number = _number(path)
    if (path / "zero").is_dir() and any((path / "zero").glob("*/fp32.pt")):
        return Foreign(DEEPSPEED, "universal", path, number)
    if any(path.glob("*_optim_states.pt")) or any(path.glob("*model_states.pt")):
        return Foreign(DEEPSPEED, "zero", path, number)
    if (path / "metadata.json").is_file() and any(
        (path / name).exists() for name in ("common.pt", ".metadata")
    ):
        return Foreign(MEGATRON, "torch_dist", path, number)
    for folder in path.glob("mp_rank_*"):
        if any(folder.glob("model*.pt")):
            return Foreign(MEGATRON, "mp_rank", path, number)
    if (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return Foreign(TRANSFORMERS, "safetensors", path)
        if any(path.glob("pytorch_model*.bin")):
            return Foreign(TRANSFORMERS, "pickled", path)
    if (path / ".metadata").is_file() and any(path.glob("*.distcp")):
        return Foreign(TORCH, "dcp", path, number)
    return None


def _number(path: Path) -> int | None:
    match = _ITERATION.fullmatch(path.name)
    return int(match[1]) if match and match[1] else None


def _tracked(tracker: Path) -> str | None:
    """Return the name of the directory that a tracker names; None if there is none, or none beside it."""
    try:
        if not tracker.is_file() or tracker.stat().st_size > _LIMIT:
            return None
        text = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    return name if _ITERATION.fullmatch(name) else None
