"""The peer of tensor parallelism trains the model that it splits: two ranks against one process."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.plain_tensor_parallel import TensorParallelGPT, parallelize
from megatron_zpp.config.model import ModelConfig
from tests.forkserver import CONTEXT

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16)
VOCABULARY, STEPS = 96, 3


def losses(model: TensorParallelGPT) -> list[float]:
    """Of steps of SGD on a batch, in fp32."""
    tokens = torch.randint(VOCABULARY, (2, CONFIG.seq_length + 1), generator=torch.Generator().manual_seed(2))
    sgd, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        found.append(model(tokens[:, :-1], tokens[:, 1:]).item())
        sgd.step()
        sgd.zero_grad()
    return found


def whole() -> TensorParallelGPT:
    torch.manual_seed(1)
    return TensorParallelGPT(CONFIG, VOCABULARY)


def one_of_two(rank: int, meeting: Path, output: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = whole()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    parallelize(model, mesh, asynchronous=False, compiles=False)
    found = losses(model)
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks = [
        CONTEXT.Process(target=one_of_two, args=(rank, tmp_path / "meeting", tmp_path / "losses"))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    found = json.loads((tmp_path / "losses").read_text())
    assert found == pytest.approx(losses(whole()), rel=1e-5)
