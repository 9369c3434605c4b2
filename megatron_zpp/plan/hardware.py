"""The GPUs that --dry-run can plan for, and the share of their data-sheet rates that our runs reach."""

import os
from dataclasses import dataclass, replace

from megatron_zpp.config.options import option_error
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.model.flops import peak_tflops

USABLE = 0.92  # of the memory: the rest is for CUDA's context, NCCL's buffers and fragmentation
MEMORY_SHARE = 0.8  # of the memory's rate: a copy reaches 0.87, kernels 0.92 of that (internals/kernels.md)
INSIDE_SHARE = 0.54  # of NVLink's rate: an all-gather on two H200s, 243 of 450 GB/s
# docs/internals/communication.md has the first two, docs/internals/planner.md the third.
SLOWDOWN = 1.07  # factor on the time of compute beside transfers
KERNEL_SLOWDOWN = 1.24  # the same beside NCCL's kernels inside a node, if copy engines are not used
# The same of ranks that share layers: products of 1/T, sums of their parts, waits for the slower rank. Fitted
# to two H100s that share 6.7B, beside each of them alone (benchmarks/plan_tensor.py).
TENSOR_SLOWDOWN = 1.12
# The time of layers' products by --fp8, casts included, over bf16's: the first number plus the second (with
# delayed scaling the third) over the hidden size. Fitted to steps of one H200 (docs/internals/planner.md).
FP8_PRODUCTS, FP8_CASTS, FP8_DELAYED_CASTS = 0.50, 770, 340
# The same of the output layer with --fp8-output-layer. Fitted to a step of one H100 at 1.3B.
FP8_OUTPUT = 0.60
# Attention's kernels compute the scores that a mask leaves, and of each token 330 more for edges and the
# start, at 1.23 of the rate of matrices. A score's exponential takes as long as 64 more channels of its head.
# So 1,024 tokens with heads of 128 take as long as the whole square, which PaLM counts. Fitted to steps of
# 1.3B with 32k and 128k tokens on two H200s (docs/internals/planner.md).
ATTENTION_RATE, ATTENTION_MARGIN, ATTENTION_CHANNELS = 1.23, 330, 64
FP8_NARROWEST = 1024  # hidden size; narrower layers are planned like these: nothing was measured below 2,048
CPU_BYTES_PER_SECOND = 55e9  # that AdamW of one rank reads and writes in CPU memory


@dataclass(frozen=True)
class Gpu:
    """NVIDIA's data sheet of an SXM module; `memory` in GiB as reported by CUDA, rates in bytes per second.

    `inside` is NVLink in one direction. `compute_share` is the share of the dense peak that forward and
    backward reach, in PaLM's FLOPs, with micro-batches of thousands of tokens.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    memory_rate: float
    inside: float
    compute_share: float
    seen: str  # the source of `compute_share`


GPUS = {
    "h100": Gpu("H100", (9, 0), 79.0, 3.35e12, 450e9, 0.67, "measured: 0.64 at 1.3B, 0.69 at 6.7B"),
    "h200": Gpu("H200", (9, 0), 139.0, 4.8e12, 450e9, 0.64, "measured: 0.63 at 1.3B, 0.66 at 8B"),
    "a100": Gpu("A100", (8, 0), 79.0, 2.04e12, 300e9, 0.5, "not measured; arXiv 2104.04473: 0.44 to 0.52"),
    "v100": Gpu("V100", (7, 0), 31.7, 0.9e12, 150e9, 0.32, "not measured; arXiv 2101.06840: 40 TFLOP/s"),
}


@dataclass(frozen=True)
class Machine:
    """The rates of one rank and its links, in bytes or FLOPs per second.

    `link` is the rate of a node with all its communicators together. `gather` and `exchange` bound the
    communicator of the all-gathers and that of the reductions, for links that one communicator cannot
    saturate, such as NCCL over sockets.
    """

    flops: float
    memory_rate: float
    inside: float
    link: float
    gather: float = float("inf")
    exchange: float = float("inf")


def machine(config: PlanConfig, dtype: str, nodes: int = 1) -> Machine:
    """The machine to plan for. Raises ValueError for a number format that the GPU does not have.

    It also raises ValueError if there are several nodes and no link.
    """
    assert config.plan_gpu is not None
    gpu, link = GPUS[config.plan_gpu], config.link_of(nodes)
    if peak_tflops(gpu.name, dtype) is None:
        raise option_error("--plan-gpu", config.plan_gpu, f"does not compute in {dtype}; add --fp16")
    return rates_of(gpu, dtype, link)


def rates_of(gpu: Gpu, dtype: str, link_gbit: float) -> Machine:
    """The rates of a GPU that computes in `dtype`; those of bf16 for a format that its data sheet lacks."""
    peak = peak_tflops(gpu.name, dtype) or peak_tflops("H100", "bfloat16")
    assert peak is not None
    return Machine(
        flops=gpu.compute_share * peak * 1e12,
        memory_rate=MEMORY_SHARE * gpu.memory_rate,
        inside=INSIDE_SHARE * gpu.inside,
        link=link_gbit * 1e9 / 8,
    )


def real_gpu(name: str, nbytes: int) -> Gpu:
    """A GPU of this name and memory, in whole GiB, so that all ranks agree; an H100's rates if not known."""
    like = next((gpu for gpu in GPUS.values() if gpu.name in name), GPUS["h100"])
    return replace(like, memory=float(nbytes // 2**30))


def cpu_ranks(ranks: int, link_gbit: float) -> tuple[float, Machine]:
    """GiB and rates of each of a node's ranks on CPUs: a part of the memory, and rates of a few cores."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(pages // ranks // 2**30), Machine(
        flops=1e11, memory_rate=1e10, inside=2e9, link=link_gbit * 1e9 / 8
    )
