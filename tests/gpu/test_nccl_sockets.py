"""--nccl-sockets reaches NCCL: what a run chooses is what NCCL says that it uses between nodes."""

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


@pytest.mark.parametrize(
    ("value", "threads", "per_thread"),
    [
        ("auto", 2, 2),
        pytest.param("3x1", 3, 1, marks=pytest.mark.gpu_long),
        pytest.param("off", None, None, marks=pytest.mark.gpu_long),
    ],
)
def test_nccl_uses_what_was_chosen(
    value: str, threads: int | None, per_thread: int | None, tmp_path: Path
) -> None:
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            run.start(rank, *FLAGS, "--nccl-sockets", value, **NODES, NCCL_HOSTID=f"node{rank}")
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        out = run.out(0)
    (line,) = (line for line in out.splitlines() if line.startswith(" NCCL's sockets: "))
    if "cores, and threads for sockets pay from" in line:
        pytest.skip(line)
    if threads is None:
        assert line == " NCCL's sockets: left to NCCL, because of --nccl-sockets off"
        assert "sockets per thread" not in out
        return
    assert f"{threads} threads × {per_thread} sockets per connection" in line
    assert f"NET/Socket: Using {threads} threads and {per_thread} sockets per thread" in out
    assert f", through {threads} threads × {per_thread} sockets" in out
