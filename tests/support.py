"""Starts the programs of this repository the way a user would."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**extra: str) -> dict[str, str]:
    """This environment, with the repository importable, few threads and no launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CI")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **extra}


def run(*argv: str | Path, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs python with `argv` from the repository's root; `extra` joins the environment."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def pretrain(*argv: str, processes: int = 1, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs pretrain_gpt.py, under torchrun where there are several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return run(*(launcher if processes > 1 else []), "pretrain_gpt.py", *argv, **extra)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
