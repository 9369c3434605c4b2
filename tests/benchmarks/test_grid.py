"""Emulated ranks have the GPUs that launch/emulate_nodes.sh gives them."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.contest.grid import gpu_map, node_environment, shares_gpus
from tests.support import executed

GRIDS = [(2, 1), (2, 2), (3, 2), (4, 2)]
CASES = [(nodes, ranks, gpus) for nodes, ranks in GRIDS for gpus in (1, 2, 4, 8)]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python that prints its environment in place of starting torchrun; FAKE_GPUS GPUs by nvidia-smi."""
    directory = tmp_path_factory.mktemp("tools")
    programs = {
        "nvidia-smi": 'for ((gpu = 0; gpu < FAKE_GPUS; gpu++)); do echo "GPU $gpu: NVIDIA H200"; done',
        "python": f'[[ $1 != -c ]] || exec {sys.executable} "$@"\necho "$NCCL_HOSTID=$CUDA_VISIBLE_DEVICES"',
    }
    for name, body in programs.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (directory / name).chmod(0o755)
    return directory


def emulated(tools: Path, nodes: int, ranks: int, gpus: int) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": f"{tools}/python", "FAKE_GPUS": f"{gpus}"}
    argv = f"env -u CUDA_VISIBLE_DEVICES launch/emulate_nodes.sh --nodes {nodes} --ranks-per-node {ranks}"
    return executed(*argv.split(), "--", "x.py", **variables)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv missing")
def test_the_map_is_that_of_the_script(tools: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda case: emulated(tools, *case), CASES))
    for (nodes, ranks, count), run in zip(CASES, runs, strict=True):
        gpus = [str(gpu) for gpu in range(count)]
        if ranks > count:
            assert run.returncode == 2
            with pytest.raises(ValueError, match=f"--ranks-per-node {ranks}"):
                gpu_map(nodes, ranks, gpus)
            continue
        assert run.returncode == 0, run.stderr
        words = run.stdout.split() + run.stderr.split()
        said = dict(word.split("=") for word in words if word.startswith("node") and "=" in word)
        mapped = gpu_map(nodes, ranks, gpus)
        assert [said[f"node{node}"].split(",") for node in range(nodes)] == mapped
        assert shares_gpus(mapped) == (nodes * ranks > count)
        for node, of_node in enumerate(mapped):
            variables = node_environment(node, of_node, {"NCCL_SOCKET_NTHREADS": "2"}, 0)
            assert f"{variables['NCCL_HOSTID']}={variables['CUDA_VISIBLE_DEVICES']}" in words
            assert variables["NCCL_SOCKET_NTHREADS"] == "2"
