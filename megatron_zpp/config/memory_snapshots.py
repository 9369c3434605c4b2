"""Copies of the states in memory that outlives the processes, from which a restarted run resumes."""

from dataclasses import dataclass

from megatron_zpp.config.options import Options, option, option_error
from megatron_zpp.config.run import CheckpointConfig

IN_MEMORY = "/dev/shm"  # a file system in memory on every Linux host
NAME_FILE = "memory_snapshots.txt"  # in --save: under which name nodes hold the memory snapshots of the run


@dataclass(frozen=True, kw_only=True)
class MemorySnapshotsConfig(Options):
    """memory snapshots: recovery without the disk"""

    buddy_snapshots: int | None = option(
        None,
        "Iterations between copies of each rank's states to the memory of its own node and of the next one, "
        "its buddy node, beside the compute. A restarted run resumes from them if they are newer than the "
        "checkpoint in --load.",
        at_least=1,
    )
    buddy_directory: str = option(
        IN_MEMORY,
        "A file system in memory (tmpfs) of each node, for --buddy-snapshots; may differ between nodes.",
        metavar="DIR",
        needs="--buddy-snapshots K",
    )


def check_resumes(snapshots: MemorySnapshotsConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ValueError unless a second start of the run continues the first one with all of its states."""
    if snapshots.buddy_snapshots is None:
        return
    if checkpoint.save is None or checkpoint.load != checkpoint.save:
        raise snapshots.error(
            "buddy_snapshots",
            "needs --save DIRECTORY and a --load equal to it, by which a restarted run is recognised",
        )
    for flag, value, given in (
        ("--finetune", "(given)", checkpoint.finetune),
        ("--no-load-optim", "(given)", not checkpoint.load_optim),
        ("--no-save-optim", "(given)", not checkpoint.save_optim),
        ("--ckpt-step", checkpoint.ckpt_step, checkpoint.ckpt_step is not None),
    ):
        if given:
            fix = "a restart would not continue exactly; omit it or --buddy-snapshots"
            raise option_error(flag, value, fix)
