"""What a run logs of its steps: sums over a log interval, throughput, memory and times."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.reporting.metrics import Interval, Stopwatch, losses_of, memory_record, peaks_of, throughput
from megatron_zpp.reporting.timing import report_times
from megatron_zpp.train.run import Run
from megatron_zpp.zero.engine import StepResult


class StepLog:
    """Adds up the steps of an interval, and logs it. Without reading a number of the device until then."""

    def __init__(self, run: Run) -> None:
        config, engine = run.config, run.engine
        self._engine, self._reporter, self._logging = engine, run.reporter, config.logging
        self._seq_length = config.model.seq_length
        self._throughput = partial(
            throughput,
            flops_per_token=flops_per_token(config.model, run.tokenizer["vocab_size"]),
            devices=engine.topology.world_size,
            peaks=peaks_of(engine.device, config.precision),
        )
        self._timing = config.timing
        self._interval = Interval(engine.device)
        self.watch = Stopwatch()  # of the time of steps: pause it for everything else
        self.more: Mapping[str, Any] = {}  # of the newest outer step
        # Of the newest step
        self._result: StepResult
        self._rate = 0.0
        self._decoupled_rate: float | None = None

    def add(
        self,
        loss: Tensor,
        weight: float,
        result: StepResult,
        samples: int,
        rate: float,
        decoupled_rate: float | None,
    ) -> None:
        """Add a step with the global batch's `samples` and its rates; for loss and weight see Interval."""
        self._interval.add(loss, weight, result, samples, self._engine.take_traffic())
        self._result, self._rate, self._decoupled_rate = result, rate, decoupled_rate

    def first_step(self, progress: Progress) -> None:
        """Say that training has begun, long before the first log line; every rank must call it."""
        loss = losses_of(self._engine.mean_over_ranks(self._interval.sums)).item()
        seconds = self.watch.total()
        self._reporter.say(f" first step, iteration {progress.iteration}: loss {loss:.4f}, {seconds:.1f} s")

    def settle(self) -> None:
        """Before an evaluation or a save, wait for the steps that a GPU still computes, in their own time."""
        if self._interval.iterations and self._engine.device.type == "cuda":
            self.watch.resume()
            torch.cuda.synchronize(self._engine.device)
            self.watch.pause()

    def rest(self, progress: Progress) -> None:
        """Log the steps since the last log line, if there are any, as a run ends; every rank must call it."""
        if self._interval.iterations:
            self.watch.resume()
            self.interval(progress)

    def interval(self, progress: Progress) -> None:
        """Log the interval that ends with the newest step; every rank must call it, for the mean loss."""
        interval, result = self._interval, self._result
        sums = self._engine.mean_over_ranks(interval.sums)  # times the same number, which cancels
        loss = interval.mean_loss(sums).item()
        z_loss = {"z_loss": interval.mean_loss(sums[[2, 1]]).item()} if len(sums) > 2 else {}
        nans = ~torch.isfinite(sums[0])  # on any rank, in each iteration
        traffic = self._engine.sum_over_ranks(torch.tensor(interval.traffic, device=self._engine.device))
        intra_node, inter_node = (traffic // interval.iterations).tolist()
        times, lines = report_times(self._timing, self._engine, interval.iterations)
        seconds, rate, logs_norm = self.watch.lap(), self._decoupled_rate, self._logging.log_params_norm
        self._reporter.log(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "lm_loss": loss,
                **z_loss,
                "grad_norm": result.grad_norm.item(),
                "learning_rate": self._rate,
                **({} if rate is None else {"decoupled_learning_rate": rate}),
                **({"params_norm": self._engine.weights_norm().item()} if logs_norm else {}),
                "global_batch_size": interval.batch,
                "loss_scale": result.loss_scale.item(),
                "skipped": int(interval.skipped.item()),
                "nan": int(nans.sum().item()),
                **({} if interval.raised_units is None else {"raised_units": interval.raised_units}),
                "elapsed_ms": 1000 * seconds / interval.iterations,
                **self._throughput(interval.samples * self._seq_length, seconds),
                "intra_node_bytes": intra_node,
                "inter_node_bytes": inter_node,
                **memory_record(self._engine.device),
                **times,
                **self.more,
            }
        )
        for line in lines:
            self._reporter.say(line)
        self._interval = Interval(self._engine.device)
