"""Context ranks on two GPUs: kernels of a ring, what two ranks learn, and transfers beside compute."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.context.ring import Ring
from megatron_zpp.model.flex import Flex
from tests.gpu.ranks import on_gpus
from tests.gpu.steady import parts_of_steps
from tests.gpu.test_tensor_parallel import BATCH, BF16, LENGTH, VOCAB, build
from tests.model.test_ring import error

CHUNK, WIDTH = 300, 64  # blocks of 128 do not divide a chunk
LONG, HEADS, STEPS = 32768, 16, 3
EPSILON = torch.finfo(torch.bfloat16).eps

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FUSED = [((4, 4), None, False, kind) for kind in ("", "sinks")] + [((6, 2), None, False, "")]
BY_FLEX = [
    ((4, 4), None, False, "cap"),
    ((6, 2), 100, False, "sinks"),
    ((6, 2), CHUNK + 1, True, "cap slopes sinks"),
    ((4, 1), None, True, "slopes"),
]


def errors(topology: Topology) -> list[tuple[Any, ...]]:
    """Cases that are not those of whole samples, by each kernel, in graphs and without them."""
    group, wrong = TensorGroup(range(2), topology.rank), []
    kernels: list[tuple[str, DotProduct, list[Any]]] = [
        *((name, DotProduct(name), FUSED) for name in ("flash", "cudnn")),
        ("auto", DotProduct(), FUSED),
        ("math", DotProduct("math"), FUSED[:1]),
        ("flex", Flex(), BY_FLEX),
    ]
    for name, kernel, cases in kernels:
        ring = Ring(kernel, group)
        graph = partial(torch.compile, fullgraph=not ring.splits_graphs, dynamic=False)
        for case in cases:
            for around in (lambda attend: attend, in_graph(graph)):
                found = error(ring, group, case, torch.bfloat16, CHUNK, WIDTH, "cuda", around)
                if not found < 4 * EPSILON:
                    wrong.append((name, case, found))
    return wrong


def in_graph(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a graph of attention to inputs that it makes."""

    def around(attend: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return compiler(lambda q, k, v, scores: attend(q * 1, k * 1, v * 1, scores=scores) * 1)

    return around


def test_each_kernel_of_a_ring_is_attention_to_whole_samples() -> None:
    """Outputs and gradients within the rounding of bf16."""
    assert on_gpus(1, 2, errors) == [[], []]


def losses(topology: Topology, context: int, comm_type: str, compiled: bool) -> list[float]:
    """Of this rank's tokens in ten steps and an evaluation of a Llama in bf16, at stage 3."""
    zero = ZeroConfig(zero_stage=3)
    engine = build(topology, 1, "llama", BF16, compiled, zero=zero, context=context, comm_type=comm_type)
    data = torch.randint(VOCAB, (10, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    found = []
    for batch in data:
        loss = engine.accumulate(batch, index=0, micro_batches=1)  # of this rank's tokens
        found.append(engine.mean_over_ranks(loss).item())
        engine.step(1e-3)
    found.append(engine.mean_over_ranks(engine.evaluate(data[0])).item())
    engine.close()
    return found


@pytest.mark.parametrize("comm_type", ["a2a", "p2p"])
def test_two_context_ranks_learn_what_one_does(comm_type: str) -> None:
    expected = losses(Topology(), 1, comm_type, False)
    for compiled in (False, True):
        of_each = on_gpus(1, 2, losses, 2, comm_type, compiled)
        assert [sum(both) / 2 for both in zip(*of_each, strict=True)] == pytest.approx(expected, rel=2**-8)


def exposed(topology: Topology, directory: str) -> tuple[float, float]:
    """Milliseconds of a pass forward and backward of one layer's attention: exposed transfers, and all."""
    ring = Ring(DotProduct(), TensorGroup(range(2), topology.rank))
    shape = 1, LONG // 2, 3 * HEADS, 128
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def passes(count: int) -> None:
        for _ in range(count):
            q, k, v = qkv.chunk(3, 2)
            ring(q, k, v, 0.0, ring.mask(q, None, None)).sum().backward()
        torch.cuda.synchronize()

    passes(2)
    file = Path(directory) / f"rank{topology.rank}.json.gz"
    parts = parts_of_steps(lambda: passes(STEPS), STEPS, file)
    return parts["exposed communication"], sum(parts.values())


@pytest.mark.gpu_long  # alone on its GPUs: what others do there is taken for waiting
def test_keys_travel_beside_attention(tmp_path: Path) -> None:
    """Of 32k tokens the rank that is behind, and so waits for no other rank, waits for no transfer."""
    assert min(waiting / whole for waiting, whole in on_gpus(1, 2, exposed, str(tmp_path))) < 0.05
