"""Emulated nodes of one machine: the GPUs that each node sees, and NCCL's settings between nodes.

The mapping is that of launch/emulate_nodes.sh, and a test compares the two: with K ranks per node, rank r of
node n has GPU (n · K + r) modulo the number of GPUs. NCCL takes ranks with different NCCL_HOSTID for ranks of
different nodes, so that these talk over sockets while ranks of one node keep NVLink.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

# Sets of NCCL's variables that all contestants of a table share. A connection has threads × sockets a thread.
NCCL_SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "4sockets": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"},
}


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a run may use, as in CUDA_VISIBLE_DEVICES; none if nvidia-smi finds none."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    gpus = re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
    if gpus and "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return gpus


def gpu_map(nodes: int, ranks_per_node: int, gpus: Sequence[str]) -> list[list[str]]:
    """The GPU of each rank, by node; empty lists without GPUs.

    Raises ValueError for a node with more ranks than there are GPUs: NCCL wants one for each of them.
    """
    if not gpus:
        return [[] for _ in range(nodes)]
    if ranks_per_node > len(gpus):
        raise ValueError(
            f"--ranks-per-node {ranks_per_node}: NCCL wants a GPU for each rank of a node, and there are "
            f"{len(gpus)}"
        )
    return [
        [gpus[(node * ranks_per_node + rank) % len(gpus)] for rank in range(ranks_per_node)]
        for node in range(nodes)
    ]


def shares_gpus(mapped: Sequence[Sequence[str]]) -> bool:
    """Whether ranks share a GPU, which distorts the measurement."""
    used = [gpu for node in mapped for gpu in node]
    return len(set(used)) < len(used)


def node_environment(
    node: int, gpus: Sequence[str], nccl: Mapping[str, str], processors_per_rank: int
) -> dict[str, str]:
    """Environment variables of one emulated node in addition to the driver's."""
    threads = str(max(1, processors_per_rank))
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_HOSTID": f"node{node}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **nccl,
    }
