"""What a run ended with, for comparison with another run; and what a failed run said."""

import hashlib
import json
from pathlib import Path

from megatron_zpp.checkpoint.directory import committed

GOOD = "equal", "one line, then equal"


def checkpoints_in(directory: Path) -> list[Path]:
    """The committed checkpoints of a local directory, the newest first."""
    return [Path(str(path)) for path in committed(directory).values()]


def digest(directory: Path) -> str:
    """SHA-256 of the newest checkpoint: its name, its states, and what else the next step follows from."""
    path = next(iter(checkpoints_in(directory)), None)
    if path is None:
        return "no checkpoint"
    sha = hashlib.sha256(path.name.encode())
    for file in sorted(path.glob("rank_*.safetensors")):
        sha.update(file.read_bytes())
    state = json.loads((path / "state.json").read_text())
    del state["progress"]["run"]  # two runs have two names
    for key in ("progress", "optimizer_steps", "loss_scale"):
        sha.update(json.dumps(state[key], sort_keys=True).encode())
    return sha.hexdigest()


def losses(metrics: Path) -> dict[int, float]:
    """The last logged loss of each iteration."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {record["iteration"]: record["lm_loss"] for record in records if "lm_loss" in record}


def problem(said: str) -> str | None:
    """Why the stderr of a rank that failed is more than one clear line of error; None if it is not."""
    lines = [line for line in said.splitlines() if "error: " in line]
    if "Traceback" in said:
        return "a traceback"
    if len(lines) > 1:
        return f"{len(lines)} lines with an error"
    return "a very long line" if lines and len(lines[0]) > 900 else None
