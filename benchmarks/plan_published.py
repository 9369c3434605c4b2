"""Plans of --dry-run for runs that others published for H100s; the share of an H100's peak is fitted to them.

LLM Foundry's table (scripts/train/benchmarking/README.md of mosaicml/llm-foundry, H100 80GB BF16) is of
GPTs without biases under PyTorch's FSDP, and counts FLOPs as this project does. Taken are all rows of one
node of 8 GPUs with fully sharded states (stage 3), 1B to 13B parameters, samples of 1,024 to 4,096 tokens
and no recomputation. Recomputed runs, longer samples and several nodes measure more than the compute.
"""

from typing import NamedTuple

from benchmarks.plan_rows import Row, h100, job_of
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.flops import peak_tflops
from megatron_zpp.plan.hardware import GPUS
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.step_time import step_time
from megatron_zpp.plan.traffic import traffic_of

RANKS, VOCAB = 8, 50368
SHAPES = {"1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40)}


class Published(NamedTuple):
    """One row of the published table; `mfu` is in per cent of 989.5 TFLOP/s."""

    model: str
    tokens: int  # of a sample
    micro_batch_size: int
    micro_batches: int
    mfu: float


ROWS = (
    Published("1b", 1024, 18, 4, 41.95),
    Published("1b", 2048, 14, 1, 41.82),
    Published("1b", 4096, 7, 4, 40.26),
    Published("3b", 1024, 20, 6, 46.20),
    Published("3b", 4096, 5, 6, 42.31),
    Published("7b", 2048, 6, 1, 46.44),
    Published("13b", 2048, 2, 1, 39.79),
)


def h100_rows() -> list[Row]:
    """A row for each published run: the MFU that --dry-run plans for it, and the one that was measured."""
    return [{**row._asdict(), "mfu": round(planned_mfu(row), 1), "measured_mfu": row.mfu} for row in ROWS]


def planned_mfu(row: Published, share: float = GPUS["h100"].compute_share) -> float:
    """Per cent of the peak, in PaLM's FLOPs, if compute reaches `share` of it; default the planner's."""
    job = _job(row)
    seconds = step_time(job, h100(share), traffic_of(job)).seconds
    peak = peak_tflops("H100", "bfloat16")
    assert peak is not None
    return 100 * job.tokens_per_step * job.flops_per_token / RANKS / seconds / (1e12 * peak)


def fitted_share() -> float:
    """The share of the peak, in hundredths, with the smallest maximum of the relative errors of a step."""

    def worst(share: float) -> float:
        return max(abs(row.mfu / planned_mfu(row, share) - 1) for row in ROWS)

    return min((hundredth / 100 for hundredth in range(30, 71)), key=worst)


def _job(row: Published) -> Job:
    layers, hidden, heads = SHAPES[row.model]
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=row.tokens,
        max_position_embeddings=row.tokens,
        disable_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    grid = (1, RANKS, row.micro_batch_size)
    return job_of(model, VOCAB, {"zero_stage": 3}, *grid, micro_batches=row.micro_batches)
