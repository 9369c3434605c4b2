"""What a run chooses for NCCL between nodes: multiprocessors that products leave to it, and its sockets."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.spare_multiprocessors import SpareMultiprocessors
from megatron_zpp.distributed.topology import Topology
from tests.gpu.ranks import on_gpus
from tests.support import Run
from tests.zero.engines import engine_of

VOCAB, SPARE = 8192, 4
MODEL = ModelConfig(num_layers=2, hidden_size=2048, num_attention_heads=16, seq_length=1024)
SMALL = ModelConfig(num_layers=2, hidden_size=128, num_attention_heads=2, seq_length=64)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def started_blocks(topology: Topology, spare: int, path: str) -> tuple[list[int], list[float]]:
    """Thread blocks of each product of a forward and backward, and the first loss and gradient norm."""
    engine = engine_of(MODEL, VOCAB, precision=PrecisionConfig(bf16=True), device="cuda")
    engine.spare = SpareMultiprocessors(spare, engine.device)
    tokens = torch.randint(VOCAB, (4, 1025), generator=torch.Generator().manual_seed(5))
    loss = engine.accumulate(tokens, index=0, micro_batches=1).item()
    numbers = [loss, engine.step(1e-3).grad_norm.item()]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.accumulate(tokens, index=0, micro_batches=1)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    engine.close()
    blocks = []
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        if event.get("cat") == "kernel" and event["name"].startswith("nvjet"):
            across, down, deep = event["args"]["grid"]
            blocks.append(across * down * deep)
    return blocks, numbers


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_products_of_both_passes_leave_them(tmp_path: Path) -> None:
    ((everywhere, numbers),) = on_gpus(1, 1, started_blocks, 0, str(tmp_path / "all.json"))
    ((fewer, same_numbers),) = on_gpus(1, 1, started_blocks, SPARE, str(tmp_path / "fewer.json"))
    have = torch.cuda.get_device_properties(0).multi_processor_count
    assert max(everywhere) == have
    assert len(fewer) >= 3 * (4 * MODEL.num_layers + 1)  # three products of each linear map, and the logits'
    assert max(fewer) <= have - SPARE
    assert same_numbers == pytest.approx(numbers, rel=torch.finfo(torch.bfloat16).eps)


def chosen_between_nodes(topology: Topology) -> int:
    """What a run chooses, with which a step runs and the engine closes."""
    engine = engine_of(
        SMALL,
        VOCAB,
        zero=ZeroConfig(zero_stage=3),
        precision=PrecisionConfig(bf16=True),
        topology=topology,
        device=f"cuda:{torch.cuda.current_device()}",
    )
    tokens = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(topology.rank))
    engine.accumulate(tokens, index=0, micro_batches=1)
    engine.step(1e-3)
    engine.close()
    return engine.spare.count


def test_only_several_nodes_leave_some() -> None:
    """Ranks of different emulated nodes talk over TCP."""
    assert on_gpus(2, 1, chosen_between_nodes) == [4 if HOPPER else 0] * 2
    assert on_gpus(1, 1, chosen_between_nodes) == [0]


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
