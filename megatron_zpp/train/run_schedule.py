"""What a run will do, worked out before anything is built: batches, iterations, learning rates."""

from dataclasses import dataclass

from megatron_zpp.config.options import refusal
from megatron_zpp.config.root import Config
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.samples import Samples
from megatron_zpp.train.learning_rate import LearningRate


@dataclass(frozen=True)
class RunSchedule:
    """`iterations` steps with the batches of `batches` and the rates of `learning_rate`."""

    batches: BatchSchedule
    learning_rate: LearningRate
    iterations: int

    @classmethod
    def from_config(cls, config: Config, ranks: int) -> "RunSchedule":
        """Raises ValueError when sizes do not divide or a length holds no step."""
        training = config.training
        batches = BatchSchedule(
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size or training.micro_batch_size * ranks,
            data_parallel_size=ranks,
            rampup=training.rampup_batch_size,
        )
        iterations = training.train_iters or batches.iterations(training.train_samples)
        if iterations == 0:
            size = batches.global_batch_size_at(0)
            raise refusal(
                "--train-samples", training.train_samples, f"must hold one global batch of {size} samples"
            )
        learning_rate = LearningRate.from_config(
            config.learning_rate,
            samples=training.train_samples or batches.samples_after(iterations),
            samples_per_iteration=batches.global_batch_size,
        )
        return cls(batches, learning_rate, iterations)

    def check_data(self, train: Samples) -> None:
        """Raises ValueError when one global batch would have to repeat samples."""
        size, there = self.batches.global_batch_size, train.windows_per_epoch
        if there is not None and there < size:
            raise refusal(
                "--global-batch-size",
                size,
                f"the train split has {there} samples; give more data or a smaller batch",
            )
