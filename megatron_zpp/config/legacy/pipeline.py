"""Pipeline ranks of another program, which become data ranks here: the batches that they compute."""

import math
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.sources.provided import Provided

FLAG = "--pipeline-model-parallel-size"
_MICRO = "training.micro_batch_size"


def divide_batch(provided: Provided, stages: int, data_ranks: int) -> tuple[str, ...]:
    """Choose the micro-batch of `data_ranks` ranks, those of the pipeline's `stages` included.

    The global batch and its ramp, and so the samples of every update, stay. The micro-batch stays too if it
    divides them; else it becomes the largest of its divisors that does. Returns a note on that. Raises
    ValueError if there is none.
    """
    micro: Any = provided.get(_MICRO)
    sizes = [provided.get("training.global_batch_size")]
    sizes += (provided.get("training.rampup_batch_size") or ())[:2]
    if micro is None or micro < 1 or None in sizes:
        return ()
    per_rank = math.gcd(*sizes) // data_ranks if all(size % data_ranks == 0 for size in sizes) else 0
    if not per_rank:
        shown = ", ".join(map(str, sizes))
        fix = (
            f"its ranks would be data ranks, and {data_ranks} of them do not divide the batch of {shown} "
            "samples; start fewer ranks, or raise --tensor-model-parallel-size"
        )
        raise option_error(FLAG, stages, fix)
    kept = math.gcd(micro, per_rank)
    if kept == micro:
        return ()
    provided.values["training"]["micro_batch_size"] = kept
    return (
        f"{FLAG} {stages}: --micro-batch-size {micro} becomes {kept}, with the same samples in an update",
    )
