"""The training loop: steps, and between them logging, evaluation and saving."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.root import Config
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.open import Splits
from megatron_zpp.data.samples import Samples
from megatron_zpp.train.evaluation import evaluate
from megatron_zpp.train.metrics import Interval, Throughput, memory_record
from megatron_zpp.train.reporter import Reporter
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.saver import Saver
from megatron_zpp.zero.engine import StepResult, ZeroEngine


class Trainer:
    """Runs `engine` through `schedule` on `splits`. `run` is the whole story; the rest are its parts."""

    def __init__(
        self,
        engine: ZeroEngine,
        splits: Splits,
        config: Config,
        schedule: RunSchedule,
        throughput: Throughput,
        reporter: Reporter,
        saver: Saver,
        progress: Progress,
    ) -> None:
        self._engine, self._splits, self._config = engine, splits, config
        self._schedule, self._throughput = schedule, throughput
        self._reporter, self._saver, self._progress = reporter, saver, progress
        self._interval = Interval()
        self._started = time.monotonic()
        self._evaluated: dict[str, int] = {}  # split -> iteration of its last evaluation

    def run(self) -> Progress:
        """Trains until the end of the schedule or an exit condition; saves; evaluates at the end."""
        if self._progress.iteration == 0:
            self._evaluate("valid")
        with self._batches() as loader:
            batches = iter(loader)
            while self._progress.iteration < self._schedule.iterations:
                self._interval.watch.resume()
                result = self._step(batches)
                self._reporter.step_done()
                if self._progress.iteration % self._config.logging.log_interval == 0:
                    self._log(result)
                self._interval.watch.pause()
                if self._progress.iteration % self._config.evaluation.eval_interval == 0:
                    self._evaluate("valid")
                self._saver.after_step()
                if self._saver.due(self._progress):
                    self._saver.save(self._progress)
                if reason := self._exit_reason():
                    self._saver.save(self._progress)
                    self._saver.finish()
                    self._reporter.say(f" exiting at iteration {self._progress.iteration}: {reason}")
                    return self._progress
        self._saver.save(self._progress)
        self._evaluate("valid")
        self._evaluate("test")
        self._saver.finish()
        return self._progress

    def _batches(self) -> MicroBatches:
        return MicroBatches(
            self._splits.train,
            self._schedule.batches,
            rank=self._engine.topology.rank,
            consumed=self._progress.consumed_samples,
            end=self._schedule.batches.samples_after(self._schedule.iterations),
            num_workers=self._config.data.num_workers,
            pin_memory=self._engine.device.type == "cuda",
        )

    def _step(self, batches: Iterator[Tensor]) -> StepResult:
        """One optimizer step on the next global batch."""
        consumed, schedule = self._progress.consumed_samples, self._schedule.batches
        micro_batches = schedule.micro_batches_at(consumed)
        losses = torch.zeros((), device=self._engine.device)
        self._engine.take_traffic()  # what an evaluation sent is not this step's
        for index in range(micro_batches):
            first_sample, _ = schedule.micro_batch(consumed, index, self._engine.topology.rank)
            seed_dropout(self._config.training.seed, first_sample)
            losses += self._engine.accumulate(next(batches), index=index, micro_batches=micro_batches)
        samples = schedule.global_batch_size_at(consumed)
        self._saver.before_step()
        result = self._engine.step(self._schedule.learning_rate(consumed))
        self._progress = replace(
            self._progress, iteration=self._progress.iteration + 1, consumed_samples=consumed + samples
        )
        self._interval.add(losses / micro_batches, result, samples, self._engine.take_traffic())
        return result

    def _log(self, result: StepResult) -> None:
        """Reports the interval that ends here; every rank takes part in the mean of the loss."""
        interval, progress = self._interval, self._progress
        loss = self._engine.mean_over_ranks(interval.loss_sum / interval.iterations).item()
        skipped = int(interval.skipped.item())
        # A skipped step with a dynamic loss scale is the scale finding its place; else it is a NaN or Inf.
        nans = 0 if self._engine.loss_scale.dynamic else skipped
        traffic = self._engine.sum_over_ranks(torch.tensor(interval.traffic, device=self._engine.device))
        intra_node, inter_node = (traffic // interval.iterations).tolist()
        seconds = interval.watch.lap()
        tokens = interval.samples * self._config.model.seq_length
        self._reporter.log(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "lm_loss": loss,
                "grad_norm": result.grad_norm.item(),
                "learning_rate": self._schedule.learning_rate(progress.consumed_samples - interval.batch),
                "global_batch_size": interval.batch,
                "loss_scale": result.loss_scale.item(),
                "skipped": skipped,
                "nan": nans,
                "elapsed_ms": 1000 * seconds / interval.iterations,
                **self._throughput.record(tokens, seconds),
                "intra_node_bytes": intra_node,
                "inter_node_bytes": inter_node,
                **memory_record(self._engine.device),
            }
        )
        interval.restart()

    def _evaluate(self, split: str) -> None:
        samples: Samples | None = getattr(self._splits, split)
        if samples is None or self._evaluated.get(split) == self._progress.iteration:
            return
        self._evaluated[split] = self._progress.iteration
        evaluation, batches = self._config.evaluation, self._schedule.batches
        count = evaluation.eval_iters * batches.global_batch_size
        if evaluation.full_validation:
            count = samples.windows_per_epoch
        loss = evaluate(self._engine, samples, count=count, micro_batch_size=batches.micro_batch_size)
        self._reporter.evaluation(self._progress.iteration, split, loss)

    def _exit_reason(self) -> str | None:
        """Why the run ends before its schedule does; the same answer on every rank."""
        training, iteration = self._config.training, self._progress.iteration
        if training.exit_interval and iteration % training.exit_interval == 0:
            return f"--exit-interval {training.exit_interval}"
        if training.exit_duration_in_mins:
            minutes = torch.tensor((time.monotonic() - self._started) / 60, device=self._engine.device)
            if self._engine.mean_over_ranks(minutes).item() >= training.exit_duration_in_mins:
                return f"--exit-duration-in-mins {training.exit_duration_in_mins}"
        return None


def seed_dropout(seed: int, first_sample: int) -> None:
    """Makes dropout a function of the seed and the samples of a micro-batch, for any world size or resume."""
    digest = hashlib.blake2b(f"dropout/{seed}/{first_sample}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
