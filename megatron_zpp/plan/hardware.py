"""GPUs that a plan knows, and what of their data sheets a run of ours reaches."""

from dataclasses import dataclass

from megatron_zpp.config.options import option_error
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.model.flops import peak_tflops

USABLE = 0.92  # of the memory: the rest is CUDA's context, NCCL's buffers and what fragmentation loses
MEMORY_SHARE = 0.8  # of the memory's rate: kernels reach 0.92 of a copy, a copy 0.87 (quantization_cuda.json)
INSIDE_SHARE = 0.54  # of NVLink's rate: an all-gather on two H200s, 243 of 450 GB/s
# docs/internals/communication.md has the first two, docs/internals/planner.md the third.
BESIDE = 1.07  # how much longer compute takes beside transfers
BESIDE_KERNELS = 1.24  # and beside those of NCCL's kernels inside a node, without copy engines
CPU_BYTES_A_SECOND = 55e9  # that one rank's AdamW reads and writes in CPU memory


@dataclass(frozen=True)
class Gpu:
    """NVIDIA's data sheets: SXM parts; `memory` in GiB as CUDA reports it, rates in bytes a second.

    `inside` is NVLink, each way. `compute_share` is what forward and backward reach of the dense peak, in
    PaLM's FLOPs, where a micro-batch has thousands of tokens.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    memory_rate: float
    inside: float
    compute_share: float
    seen: str  # where `compute_share` is from


GPUS = {
    "h100": Gpu("H100", (9, 0), 79.0, 3.35e12, 450e9, 0.64, "as one H200 reaches"),
    "h200": Gpu("H200", (9, 0), 139.0, 4.8e12, 450e9, 0.64, "one H200 at 1.3B, benchmarks/results"),
    "a100": Gpu("A100", (8, 0), 79.0, 2.04e12, 300e9, 0.5, "not measured; 2104.04473 has 0.44 to 0.52"),
    "v100": Gpu("V100", (7, 0), 31.7, 0.9e12, 150e9, 0.32, "not measured; 2101.06840 has 40 TFLOP/s"),
}


@dataclass(frozen=True)
class Machine:
    """What one rank computes with and sends over; all rates in bytes or FLOPs per second.

    `link` is what a node reaches with all its communicators together. `gather` and `exchange` bound the
    communicator of the all-gathers and that of the reductions, where one alone reaches less, as NCCL does
    over sockets.
    """

    flops: float
    memory_rate: float
    inside: float
    link: float
    gather: float = float("inf")
    exchange: float = float("inf")


def machine(config: PlanConfig, dtype: str) -> Machine:
    """The planned one. Raises ValueError for a number format that the GPU does not have."""
    gpu = GPUS[config.plan_gpu]
    peak = peak_tflops(gpu.name, dtype)
    if peak is None:
        raise option_error("--plan-gpu", config.plan_gpu, f"does not compute in {dtype}; add --fp16")
    share = config.plan_compute_share or gpu.compute_share
    return Machine(
        flops=share * peak * 1e12,
        memory_rate=MEMORY_SHARE * gpu.memory_rate,
        inside=INSIDE_SHARE * gpu.inside,
        link=config.plan_link_gbit * 1e9 / 8,
    )
