"""NCCL's sockets: what a run chooses is what NCCL says that it uses between nodes."""

from pathlib import Path

import pytest

from tests.support import Run

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 1 --hidden-size 64 "
    "--num-attention-heads 1 --seq-length 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --device cuda --log-interval 1 --no-compile"
).split()
NODES = {
    "LOCAL_RANK": "0",  # the two emulated nodes share a GPU
    "LOCAL_WORLD_SIZE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_DEBUG": "INFO",
}


def test_nccl_uses_what_was_chosen(tmp_path: Path) -> None:
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            run.start(rank, *FLAGS, **NODES, NCCL_HOSTID=f"node{rank}")
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        out = run.out(0)
    (line,) = (line for line in out.splitlines() if line.startswith(" NCCL's sockets: "))
    if "cores, and threads for sockets pay from" in line:
        pytest.skip(line)
    assert "2 threads × 2 sockets per connection" in line
    assert "NET/Socket: Using 2 threads and 2 sockets per thread" in out
    assert ", through 2 threads × 2 sockets" in out
