"""Runs a module as the ranks of several emulated nodes: one torchrun per node, all ended together."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.common import ROOT, end_group

_TAIL = 3000  # characters of a failed run's output that a result keeps


@dataclass(frozen=True)
class Outcome:
    """`failed`: why a run failed, in one line, then with details; None if it succeeded."""

    seconds: float
    failed: str | None


def run_on_nodes(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    ranks_per_node: int,
    limit_seconds: float,
) -> Outcome:
    """Runs `python -m MODULE ARGUMENTS` on every rank; node n adds `environments[n]` to this environment.

    The first node that fails, and the time limit, end all nodes.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(environments))]
    launcher += ["--nproc-per-node", str(ranks_per_node), "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(get_free_port())]
    started, processes, failed = time.perf_counter(), [], None
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch) / f"node{node}" for node in range(len(environments))]
        try:
            for node, (extra, output) in enumerate(zip(environments, outputs, strict=True)):
                with open(output, "w") as file:
                    process = subprocess.Popen(
                        [*launcher, "--node-rank", str(node), "-m", module, *arguments],
                        cwd=ROOT,
                        env={**os.environ, **extra},
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                processes.append(process)
            failed = _wait(processes, started + limit_seconds)
        finally:  # no process may outlive the benchmark
            for process in processes:
                end_group(process)
        if failed:
            said = [_readable(path) for path in outputs]
            failed += f": {_reason(said)}"
            failed += "".join(f"\nnode {node}: {text[-_TAIL:].strip()}" for node, text in enumerate(said))
    return Outcome(time.perf_counter() - started, failed)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Why the run failed, as soon as it does; None after all nodes have ended with status 0."""
    while True:
        statuses = [process.poll() for process in processes]
        for node, status in enumerate(statuses):
            if status:
                return f"node {node} failed with status {status}"
        if None not in statuses:
            return None
        if time.perf_counter() > deadline:
            return "ran past its time limit"
        time.sleep(0.05)


def _readable(output: Path) -> str:
    """What a node printed, without the directories of this machine."""
    text = output.read_text(errors="replace")
    for directory in (str(ROOT), sys.prefix, sys.base_prefix):
        text = text.replace(directory, "…")
    return text


def _reason(outputs: list[str]) -> str:
    """The line of a rank's output that most likely says why it ended; torchrun's lines come last."""
    lines = [line.strip() for text in outputs for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b.*", line)]
    of_ranks = [line for line in errors if line.startswith("[rank")]
    return (of_ranks or errors or lines or ["it printed nothing"])[-1 if of_ranks or not errors else 0]
