"""Pipeline ranks of another program, which become data ranks here: the batches that they compute."""

import math
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.sources.provided import Provided

FLAG = "--pipeline-model-parallel-size"
_MICRO, _GLOBAL = "training.micro_batch_size", "training.global_batch_size"


def divide_batch(provided: Provided, stages: int, data_ranks: int) -> tuple[str, ...]:
    """Choose the micro-batch of `data_ranks` ranks, those of the pipeline's `stages` included.

    The global batch and its ramp, and so the samples of every update, stay; the default is that of the other
    program. The micro-batch stays too if it divides them; else it becomes the largest of its divisors that
    does. Returns a note on that. Raises ValueError if there is none.
    """
    micro: Any = provided.get(_MICRO)
    if micro is None or micro < 1:
        return ()
    batch = provided.get(_GLOBAL) or micro * max(1, data_ranks // stages)
    sizes = [batch, *(provided.get("training.rampup_batch_size") or ())[:2]]
    if any(size < 1 or size % data_ranks for size in sizes):
        fix = (
            f"its ranks would be data ranks, and {data_ranks} of them do not divide the batch of "
            f"{', '.join(map(str, sizes))} samples; start fewer ranks, or raise --tensor-model-parallel-size"
        )
        raise option_error(FLAG, stages, fix)
    kept = math.gcd(micro, math.gcd(*sizes) // data_ranks)
    if kept == micro:
        return ()
    provided.values["training"] |= {"micro_batch_size": kept, "global_batch_size": batch}
    same = f"with the same {batch} samples in an update"
    return (f"{FLAG} {stages}: --micro-batch-size {micro} becomes {kept}, {same}",)
