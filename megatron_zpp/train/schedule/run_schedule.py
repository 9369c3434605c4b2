"""The batches, iterations and learning rates of a run, computed before anything is built."""

import math
from dataclasses import dataclass, replace

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import EvaluationConfig, TrainingConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.samples import Epochs, Samples
from megatron_zpp.train.schedule.learning_rate import LearningRate


@dataclass(frozen=True)
class RunSchedule:
    """Steps up to the iteration `iterations`, with the batches of `batches` and the rates of `learning_rate`.

    `train_samples` is the length of a run given in samples; None if it is given in iterations. `start` is
    the progress from which this process trains: its batches begin there. `decoupled` has the rates of
    --decoupled-lr, if it is given. `until`: samples of --train-tokens, which the last step reaches.
    `islands` share the training samples; all other counts of samples are those of this one.
    """

    batches: BatchSchedule
    learning_rate: LearningRate
    iterations: int
    train_samples: int | None = None
    start: Progress = Progress()
    decoupled: LearningRate | None = None
    until: float = math.inf
    islands: int = 1

    @classmethod
    def from_config(
        cls,
        training: TrainingConfig,
        learning_rate: LearningRateConfig,
        ranks: int,
        *,
        seq_length: int,
        islands: int = 1,
    ) -> "RunSchedule":
        """The schedule from iteration 0. Raises ValueError if sizes do not divide or there is no step."""
        batches = BatchSchedule(
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size or training.micro_batch_size * ranks,
            data_parallel_size=ranks,
            rampup=training.rampup_batch_size,
        )
        iterations = training.train_iters
        if iterations is None:
            assert training.train_samples is not None  # one of the two is set, as TrainingConfig checks
            iterations = batches.iterations(training.train_samples)
        if iterations == 0:
            size = batches.global_batch_size_at(0)
            raise option_error(
                "--train-samples", training.train_samples, f"must hold one global batch of {size} samples"
            )
        rate = LearningRate.from_config(
            learning_rate,
            samples=training.train_samples or batches.samples_after(iterations),
            samples_per_iteration=batches.global_batch_size,
        )
        until = math.inf if training.train_tokens is None else training.train_tokens / seq_length
        iterations = int(min(iterations, _steps_to(until, batches)))
        decoupled = rate.decoupled(learning_rate)
        length = training.train_samples
        return cls(batches, rate, iterations, length, decoupled=decoupled, until=until, islands=islands)

    def resumed(self, start: Progress) -> "RunSchedule":
        """The same schedule from `start` on; other batch sizes may have been used up to there.

        The run still ends at --train-iters or before it would exceed --train-samples, or with --train-tokens.
        """
        consumed, iterations = start.consumed_samples, self.iterations
        if self.train_samples is not None:
            iterations = start.iteration + self.batches.iterations(self.train_samples, consumed=consumed)
        until = start.iteration + _steps_to(self.until, self.batches, consumed=consumed)
        return replace(self, iterations=int(min(iterations, until)), start=start)

    @property
    def samples(self) -> int:
        """The number of samples that the run has consumed at its end."""
        left = max(0, self.iterations - self.start.iteration)
        return self.batches.samples_after(left, consumed=self.start.consumed_samples)

    def learning_rate_at(self, progress: Progress) -> float:
        """The learning rate of the step that begins at `progress`."""
        return self.learning_rate(self._schedule_samples(progress))

    def decoupled_rate_at(self, progress: Progress) -> float | None:
        """The same of embedding and output layer; None if they have no rate of their own."""
        return None if self.decoupled is None else self.decoupled(self._schedule_samples(progress))

    def _schedule_samples(self, progress: Progress) -> int:
        """The samples on which the learning rate of the step that begins at `progress` depends.

        As in Megatron-LM, a skipped step does not advance the learning rate. A schedule given in iterations
        counts iterations of the present global batch size. So a resumed run with another
        batch size has the rate of its iteration: the rate does not jump, and the decay ends with the run.
        """
        if self.train_samples is None:
            steps = progress.iteration - progress.skipped_iterations
            return steps * self.batches.global_batch_size
        return progress.consumed_samples - progress.skipped_samples

    def requested_samples(
        self, training: TrainingConfig, evaluation: EvaluationConfig
    ) -> dict[str, int | None]:
        """How many samples Megatron-LM asks each split for, on which its order depends; None is one epoch.

        It counts an evaluation every --eval-interval and one more, each with samples of its own, and a whole
        --global-batch-size for every step. --full-validation here reads all of the test split as well.
        """
        batch, iterations = self.batches.global_batch_size, self.iterations
        if self.batches.rampup and self.batches.samples_after(iterations) <= self.batches.rampup[2]:
            iterations += 1  # it counts the step in which the samples run out before the ramp ends
        evaluations = iterations // evaluation.eval_interval + 1
        valid = evaluations * evaluation.eval_iters * batch
        evaluated = self.evaluated_samples(evaluation)
        return {
            "train": training.train_samples or self.iterations * batch * self.islands,
            "valid": None if evaluated is None else valid,
            "test": evaluated,
        }

    def evaluated_samples(self, evaluation: EvaluationConfig) -> int | None:
        """How many samples of a split each evaluation reads; None is one epoch."""
        if evaluation.full_validation:
            return None
        return evaluation.eval_iters * self.batches.global_batch_size

    def describe_epochs(self, train: Samples) -> list[str]:
        """Log lines on how often each data set is read, so far and in total; none for endless data sets."""
        consumed = self.start.consumed_samples
        samples = self.samples
        lines = []
        if consumed and (parts := train.epochs(consumed)):
            lines.append(f" train: the {consumed:,} samples so far read {_listed(parts)}")
        if parts := train.epochs(samples) if samples >= consumed else []:
            lines.append(f" train: the run's {samples:,} samples read {_listed(parts)}")
        if spent := [f"{'probably ' * part.about}{part.name}" for part in parts if part.times > 1]:
            lines.append(f" train: exhausted before the end, and then read again: {', '.join(spent)}")
        return lines

    def check_data(self, train: Samples) -> None:
        """Raise ValueError if one global batch, of all islands, would have to repeat samples."""
        size, there = self.batches.global_batch_size, train.windows_per_epoch
        if there is not None and there < size * self.islands:
            of_all = f", and {self.islands} islands read {size * self.islands}" if self.islands > 1 else ""
            raise option_error(
                "--global-batch-size",
                size,
                f"the train split has {there} samples{of_all}; give more data or a smaller batch",
            )


def _steps_to(samples: float, batches: BatchSchedule, *, consumed: int = 0) -> float:
    """Steps from sample `consumed` until at least `samples` are, as Megatron-DeepSpeed counts them."""
    if samples == math.inf:
        return math.inf
    whole = batches.iterations(math.ceil(samples), consumed=consumed)
    return whole + (batches.samples_after(whole, consumed=consumed) < samples)


def _listed(parts: list[Epochs]) -> str:
    return ", ".join(f"{'about ' * part.about}{part.times:.2f} × {part.name}" for part in parts)
