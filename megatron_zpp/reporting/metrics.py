"""The numbers of a logged step: measured here, written by the console and the sinks."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.model.flops import peak_tflops
from megatron_zpp.zero.engine import StepResult
from megatron_zpp.zero.step_sums import LEAST_WEIGHT

Record = dict[str, Any]  # numbers and texts, by name; None is unknown


def finite(record: Record) -> Record:
    """A record in which NaN and Inf are None, null in JSON, which has neither."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def throughput(
    tokens: int, seconds: float, flops_per_token: float, devices: int, peaks: Mapping[str, float | None]
) -> Record:
    """tokens_per_second of the whole run; tflops_per_gpu and shares of `peaks_of` of one device."""
    rate = tokens / seconds
    tflops = rate * flops_per_token / devices / 1e12
    shares = {name: None if peak is None else tflops / peak for name, peak in peaks.items()}
    return {"tokens_per_second": rate, "tflops_per_gpu": tflops, **shares}


def peaks_of(device: torch.device, precision: PrecisionConfig) -> dict[str, float | None]:
    """The data sheet's peak of a device in TFLOP/s as `mfu`, None if unknown.

    With 8-bit products `mfu_16bit` is that of 16-bit ones.
    """
    if device.type != "cuda":
        return {"mfu": None}
    name = torch.cuda.get_device_name(device)
    peak = peak_tflops(name, precision.compute_dtype("cuda"))
    if not precision.fp8:
        return {"mfu": peak}
    return {"mfu": peak_tflops(name, "float8")} | ({} if peak is None else {"mfu_16bit": peak})


class Stopwatch:
    """Measures seconds of training: those between `resume` and `pause`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._started: float | None = None  # while it runs

    def pause(self) -> None:
        """Stop counting, for an evaluation or a save."""
        self._total, self._started = self.total(), None

    def resume(self) -> None:
        """Count from here on, if it does not already: a run may also stop within a step."""
        if self._started is None:
            self._started = time.perf_counter()

    def total(self) -> float:
        """Seconds of the lap so far."""
        return self._total + (0.0 if self._started is None else time.perf_counter() - self._started)

    def lap(self) -> float:
        """Seconds since the last lap; the next one begins."""
        seconds = self.total()
        self._total, self._started = 0.0, time.perf_counter()
        return seconds


@dataclass
class Interval:
    """Sums over the steps since the last log line."""

    device: torch.device
    iterations: int = 0
    samples: int = 0
    batch: int = 0  # samples of the newest step
    raised_units: int | None = None  # the most of any step; None where no weight differences are sent
    traffic: tuple[int, int] = (0, 0)  # bytes that this rank sent inside its node and between nodes
    # Of each step, on the device, because reading them would wait for it: loss, and 1 if it was skipped.
    _losses: list[Tensor] = field(default_factory=list)
    _skips: list[Tensor] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)  # of each step, of this rank's loss

    def add(
        self, loss: Tensor, weight: float, result: StepResult, samples: int, traffic: tuple[int, int]
    ) -> None:
        """Add one step: `loss` is a sum over this rank's micro-batches, `weight` that of their weights.

        It is (), or with a z-loss (2,), where that is second.

        The weight of a micro-batch is the share of its tokens that count.
        """
        self.iterations += 1
        self.samples += samples
        self.batch = samples
        self.traffic = (self.traffic[0] + traffic[0], self.traffic[1] + traffic[1])
        if result.raised_units is not None:
            self.raised_units = max(self.raised_units or 0, result.raised_units)
        self._losses.append(loss)
        self._skips.append(result.skipped)
        self._weights.append(weight)

    @property
    def skipped(self) -> Tensor:
        """How many steps were skipped, () on the device."""
        return torch.stack(self._skips).sum()

    @property
    def sums(self) -> Tensor:
        """(2, iterations) fp64 of this rank: the sum of losses of each step, and that of their weights.

        With z-losses (3, iterations): their sums are last.
        """
        weights = torch.tensor(self._weights, dtype=torch.float64, device=self.device)
        loss, *others = torch.stack(self._losses, -1).double().view(-1, self.iterations)
        return torch.stack((loss, weights, *others))

    def mean_loss(self, sums: Tensor) -> Tensor:
        """The mean loss () of the steps that were not skipped; `sums` are those of all ranks.

        It is NaN or Inf if the loss of any step was. If all steps were skipped, it is the mean over all.
        """
        losses, skipped = losses_of(sums), torch.stack(self._skips).bool()
        left_out = skipped & torch.isfinite(losses)  # as in Megatron-LM, but for NaN and Inf
        taken = self.iterations - self.skipped
        return torch.where(
            taken > 0, torch.where(left_out, 0.0, losses).sum() / taken.clamp(min=1), losses.mean()
        )


def losses_of(sums: Tensor) -> Tensor:
    """The mean loss per token (iterations,) of each step, from (2, iterations) as in `Interval.sums`."""
    return sums[0] / sums[1].clamp(min=LEAST_WEIGHT)  # if no token counts, 0


def memory_record(device: torch.device) -> Record:
    """Current and peak bytes of this process: tensors on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        allocated = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # The kernel counts a process's peak less often than what it has.
    return {"memory_allocated_bytes": allocated, "memory_peak_bytes": max(peak, allocated)}


def evaluation_record(iteration: int, split: str, loss: float) -> Record:
    """The record of an evaluation; perplexity is capped as in Megatron-LM."""
    return {
        "iteration": iteration,
        f"{split}_loss": loss,
        f"{split}_perplexity": math.exp(min(20.0, loss)) if loss == loss else loss,
    }
