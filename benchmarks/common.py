"""What every benchmark shares: the machine it ran on, and where its result goes."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STOPPED = 75  # the exit status if a limit of time ended a call, which the same command resumes


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and package versions: what a figure depends on."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in described if line.startswith("model name"))
    facts: dict[str, Any] = {
        "processor": next(names, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {
            name: package_version(name)
            for name in ("torch", "torchao", "numpy", "sentencepiece", "tokenizers")
        },
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def save_result(name: str, figures: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Write `figures` with machine, command and commit to DIRECTORY/NAME.json.

    Readers see the old file or the whole new one.
    """
    result = {
        "benchmark": name,
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, path)
    return path


def figures_of(name: str) -> dict[str, Any]:
    """The figures of a result of RESULTS."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def commit() -> str:
    """The commit: BENCHMARK_COMMIT, for a copy of the tree without history, else from git.

    It ends in -modified if a file has changed that is not a result.
    """
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", ".", ":(exclude)benchmarks/results"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-modified" if changed.stdout.strip() else "")


def program_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help prints `description` as it is written."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def package_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the group of a launcher: SIGTERM first, on which it ends its ranks, and SIGKILL after 20 s."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
