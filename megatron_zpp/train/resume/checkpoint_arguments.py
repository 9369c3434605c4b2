"""Reads what --use-checkpoint-args takes from a checkpoint."""

from megatron_zpp.checkpoint.directory import each_candidate, read_newest
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.config.sources.checkpoint_arguments import CheckpointArguments
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.location import Location


def read_arguments(load: str, iteration: int | None) -> CheckpointArguments | None:
    """The arguments of the newest checkpoint of a directory that can be read; None if it holds none.

    Raises ValueError for a checkpoint that is missing, and for an older one whose tokenizer is gone.
    """

    def read(path: Location) -> CheckpointArguments:
        with CheckpointReader(path) as reader:
            _, tokenizer = trained_tokenizer(reader)
            config = reader.config()
            return CheckpointArguments(
                name=str(path),
                model=config.model,
                tokenizer=tokenizer,
                learning_rate=config.learning_rate,
                weight_decay=config.optimizer.weight_decay,
                training=config.training,
            )

    # Ranks read alone, before they connect. If they come to read different checkpoints, the settings are
    # those of one run, or `check_agreement` says which differ.
    return read_newest(
        lambda: each_candidate(load, iteration), read, lambda error: isinstance(error, DamagedFile)
    )
