"""Plans of --dry-run for two H100s that share layers, or have ZeRO-3, beside what was measured.

A time is the median of the intervals after the first. The share of the peak is fitted to one GPU alone that
trains half of the layers: for ZeRO-3 to a GPU of its own machine, for the others to the GPUs of T = 2.
TENSOR_SLOWDOWN of plan/hardware.py is fitted to T = 2 (`fitted_slowdown`). Nothing is fitted to other runs.
Memory is compared without what GPUs write for each other, which torch does not count.
"""

import statistics
from dataclasses import dataclass, replace

from benchmarks.common import figures_of
from benchmarks.plan_rows import GPU_VOCAB, Row, fitted, h100, job_of, row_of
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.plan.hardware import TENSOR_SLOWDOWN, Machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.step_time import compute_seconds, step_time
from megatron_zpp.plan.traffic import traffic_of

MODEL = ModelConfig(model_preset="6.7b", seq_length=2048, hidden_dropout=0.0, attention_dropout=0.0)
HALF = replace(MODEL, model_preset=None, num_layers=16)
LONG = ModelConfig(model_preset="1.3b", seq_length=65536, hidden_dropout=0.0, attention_dropout=0.0)
RESULT = "throughput_tensor"  # its parts are results of several calls and machines
PAIR = ("one_gpu", "other_gpu")  # the GPUs of T = 2, each alone
OTHER = ("stage_3_one_gpu",)  # a GPU of ZeRO-3, alone


@dataclass(frozen=True)
class Measured:
    """A run, and the parts of the result that have its figures at `shape`, and there at `name`."""

    run: str
    parts: tuple[str, ...]
    shape: str
    name: str | None
    job: Job
    alone: tuple[str, ...] = PAIR  # parts of one GPU, to which the share of the peak is fitted
    fitted: bool = False

    def milliseconds(self) -> float:
        """The median of the intervals after the first, of all parts."""
        figures = self._figures()
        if self.name is None:
            return float(figures[0]["milliseconds"])
        return statistics.median(ms for figure in figures for ms in figure["intervals_ms"][1:])

    def gibibytes(self) -> float:
        """The peak."""
        return max(figure["peak_gib"] for figure in self._figures())

    def _figures(self) -> list[Row]:
        figures = figures_of(RESULT)
        found = [figures[part][self.shape] for part in self.parts]
        return found if self.name is None else [one[self.name] for one in found]


def one_gpu(parts: tuple[str, ...]) -> Measured:
    """Half of the layers on one GPU."""
    job, run = job_of(HALF, GPU_VOCAB, {}, 1, 1, 4), "one GPU, 16 layers"
    if parts is OTHER:
        run += ", ZeRO-3's machine"
    return Measured(run, parts, "16x4096x32:4", "stage 0", job, parts, fitted=True)


def tensor_ranks() -> Measured:
    """The run to which TENSOR_SLOWDOWN is fitted."""
    job = _shared(MODEL, 4, overlapped=True)
    return Measured("T = 2", ("two_gpus",), "6.7b:4", "tensor", job, fitted=True)


def zero_3() -> Measured:
    """ZeRO-3 with as many samples on as many GPUs."""
    job = job_of(MODEL, GPU_VOCAB, {"zero_stage": 3}, 1, 2, 2)
    return Measured("ZeRO-3", ("stage_3",), "6.7b:2", "stage 3", job, OTHER)


def tensor_rows() -> list[Row]:
    """A row for each run: the plan beside the measurement."""
    waiting, long = _shared(MODEL, 4, overlapped=False), _shared(LONG, 1, overlapped=True)
    runs = (
        one_gpu(PAIR),
        tensor_ranks(),
        Measured("T = 2, exchanges by NCCL", ("nccl",), "6.7b:4", "tensor", waiting),
        Measured("T = 2, 1.3B, 65,536 tokens", ("long_sample",), "two GPUs, T = 2", None, long),
        one_gpu(OTHER),
        zero_3(),
    )
    return [_row(run) for run in runs]


def fitted_h100(alone: tuple[str, ...]) -> Machine:
    """The H100 whose plan of one GPU takes as long as in these results."""
    one = one_gpu(alone)
    return fitted(one.job, one.milliseconds() / 1000, h100, 0.3, 1.0)


def fitted_slowdown() -> float:
    """The factor on the compute of tensor ranks, in hundredths, with which T = 2 is planned as measured."""
    run = tensor_ranks()
    gpu = fitted_h100(run.alone)
    compute = sum(compute_seconds(run.job, gpu, forward) for forward in (True, False))
    others = step_time(run.job, gpu, traffic_of(run.job)).seconds - compute
    return round((run.milliseconds() / 1000 - others) / (compute / TENSOR_SLOWDOWN), 2)


def _shared(model: ModelConfig, size: int, *, overlapped: bool) -> Job:
    """Two GPUs that share each layer, and micro-batches of `size` samples."""
    job = job_of(model, GPU_VOCAB, {}, 1, 2, size)
    return replace(job, tensor=2, units=units_of(model, GPU_VOCAB, 2), overlapped=overlapped)


def _row(run: Measured) -> Row:
    gpu = fitted_h100(run.alone)
    measured = {"peak_gib": run.gibibytes(), "milliseconds": run.milliseconds()}
    share = round(gpu.flops / h100(1.0).flops, 3)
    return row_of(run.job, gpu, measured, fitted=run.fitted, run=run.run, share=share)
