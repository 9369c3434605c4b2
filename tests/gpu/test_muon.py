"""Muon on GPUs, over NCCL: the CPU's cases, and its kernels against plain torch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.segments import GradSegment
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.placement import Placement
from megatron_zpp.zero import newton_schulz, whole_matrices
from megatron_zpp.zero.muon_passes import MuonElements, MuonPasses, StepNumbers
from megatron_zpp.zero.whole_matrices import Matrix, Place
from tests.gpu.ranks import on_gpus
from tests.zero import test_muon as cases
from tests.zero.engines import engine_of, operations

# Where there is no GPU, tests/zero/test_muon.py runs kernels in Triton's interpreter, which has no bf16.
DEVICE, HALF = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)


@pytest.mark.parametrize(("stage", "beta2"), [(0, None), (3, None), (3, 0.75)])
def test_updates_are_those_of_float64(stage: int, beta2: float | None) -> None:
    for rank in on_gpus(1, 2, cases.found, {"zero_stage": stage}, True, "cuda", beta2, share_one_gpu=True):
        cases.check(rank, *cases.expected(3, nesterov=True, beta2=beta2))


def test_what_four_bits_lose_of_gradients_arrives_later() -> None:
    for arrived, owed in on_gpus(2, 1, cases.telescoped, cases.FOUR, "cuda"):
        cases.check_owed(arrived, owed)


def beside_products(topology: Topology) -> tuple[int, int]:
    """Exchanges of matrices in a step of four rounds, and how many of them run beside other kernels.

    Products of matrices of this width take longer than the host needs to launch them.
    """
    model = ModelConfig(num_layers=4, hidden_size=4096, num_attention_heads=32, seq_length=64)
    optimizer = OptimizerConfig(optimizer="muon", weight_decay=0.1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(whole_matrices, "_LEAST", 1)
        patched.setattr(whole_matrices, "_IMBALANCE", math.inf)
        engine = engine_of(
            model,
            512,
            zero=ZeroConfig(zero_stage=1),
            optimizer=optimizer,
            precision=PrecisionConfig(bf16=True),
            topology=topology,
            device="cuda",
            operations=operations(),
            matrices=trained_matrices(model, optimizer),
        )
    for _ in range(3):
        engine.accumulate(torch.zeros(1, 65, dtype=torch.long, device="cuda"))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            engine.step(1e-3)
            torch.cuda.synchronize()
    engine.close()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    sent = [kernel.time_range for kernel in kernels if "SendRecv" in kernel.name]
    others = [kernel.time_range for kernel in kernels if "nccl" not in kernel.name]
    beside = [one for one in sent if any(one.start < each.end and each.start < one.end for each in others)]
    return len(sent), len(beside)


@pytest.mark.gpu_long  # alone on its GPUs: a host that is late launches products after their exchange
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_matrices_of_the_next_round_come_together_beside_products() -> None:
    for sent, beside in on_gpus(1, 2, beside_products):
        assert sent == 8
        assert beside >= 3


@pytest.mark.parametrize("unit", [16, 4, 1], ids=lambda unit: f"multiples of {unit}")
@pytest.mark.parametrize("made", [torch.float32, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_passes_are_those_of_plain_torch(unit: int, made: torch.dtype, found_inf: float) -> None:
    """Three parts, of which the second is not sent, in two segments of a gradient."""
    from megatron_zpp.zero.fused.muon import FusedPasses

    owned, states = range(512, 40960), range(512, 30720)
    sizes = [9008 // unit * unit, 5008 // unit * unit, unit]
    starts = [512 + 64, 512 + 10080, 512 + 16032]
    there, back = [16, None, 16384], [20000, 10016, 36000]
    matrix = Matrix(0, Placement(name="any", shape=(1, 1)), range(1))
    places = [
        Place(matrix, range(start, start + size), *both)
        for start, size, both in zip(starts, sizes, zip(there, back, strict=True), strict=True)
    ]
    divisor, skipped, steps = torch.tensor([3.0, found_inf, 7.0], device=DEVICE)
    numbers = StepNumbers(divisor, skipped, 0.99, -0.02, steps)

    def results(kind: Callable[[MuonElements], MuonPasses]) -> list[Tensor]:
        draw = torch.Generator(DEVICE).manual_seed(1)
        gradient, room, momentum, master, source = (
            torch.randn(numel, generator=draw, device=DEVICE)
            for numel in (len(owned), 2**16, len(states), len(owned), len(owned))
        )
        gradient, room, source = gradient.to(made), room.to(made), source.to(HALF)
        momentum = momentum if made == torch.float32 else momentum.bfloat16()
        given = MuonElements(places, [0.5, 1.5, 2.0], room, owned, states, 2, 0.9, nesterov=unit > 1)
        passes = kind(given)
        passes.average(
            [GradSegment(0, gradient[:10048]), GradSegment(10048, gradient[10048:])], momentum, numbers
        )
        passes.apply(master, source if unit > 1 else None, numbers)
        return [room, momentum, master, source]

    for mine, plain in zip(results(FusedPasses), results(MuonPasses), strict=True):
        assert torch.allclose(mine.float(), plain.float(), atol=2e-6, rtol=2 * torch.finfo(mine.dtype).eps)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).to(HALF)


@pytest.mark.parametrize("shape", [(3, 1024, 1024), (2, 1088, 2112), (1, 2112, 1088)])
@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "by columns"])
def test_half_of_a_symmetric_product_is_the_whole(shape: tuple[int, ...], turned: bool) -> None:
    from megatron_zpp.zero.fused import symmetric

    x = drawn(*shape).mT.contiguous().mT if turned else drawn(*shape)
    gram = symmetric.squared(x)
    added = symmetric.squared(gram, 0.01, -3.0)
    for found, of, numbers in ((gram, x, (1.0, 0.0)), (added, gram, (0.01, -3.0))):
        exact = newton_schulz.squared(of.double(), *numbers)
        error, allowed = (
            (each.double() - exact).norm() for each in (found, newton_schulz.squared(of, *numbers))
        )
        assert error <= 1.5 * allowed
        tiles = torch.arange(found.shape[1], device=DEVICE) // symmetric._TILE
        mirrored = tiles[:, None] > tiles
        assert torch.equal(found[:, mirrored], found.mT[:, mirrored])


@pytest.mark.parametrize("shape", [(2, 2048, 4096), (2, 4096, 2048)])
def test_singular_values_are_near_one(shape: tuple[int, ...]) -> None:
    from megatron_zpp.zero.fused import symmetric

    x = drawn(*shape)
    assert symmetric.serves(x)
    newton_schulz.orthogonalize_(x, newton_schulz.coefficients("quintic", 5))
    values = torch.linalg.svdvals(x.float())
    assert values.min() > 0.65
    assert values.max() < 1.25
