"""What outer steps of an island cost: memory, bytes, and the interval at which its link hides them."""

import math
from collections.abc import Iterator

from megatron_zpp.config.words import counted, decimal_bytes, duration
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.job import Job

BYTES = {"fp32": 4.0, "bf16": 2.0, "rotated4": 4 / 8 + 2 / 256, "rotated2": 2 / 8 + 2 / 256}  # per parameter
_EXPOSED = 0.1  # of the time: what an exchange without overlap may take


def state_bytes(job: Job) -> int:
    """Bytes of a rank's outer states, which all ranks share at every ZeRO stage.

    Outer weights, momentum, and with --outer-overlap the weights that were sent, in fp32; with rotated codes
    what they lost, in bf16, and while an exchange travels what they had lost before, and the codes.
    """
    islands = job.islands
    codes, travels = islands.outer_format.startswith("rotated"), bool(islands.outer_overlap)
    each = 8 + 4 * travels + codes * (2 + travels * (2 + BYTES[islands.outer_format]))
    return int(each * sum(layout.shard_numel for layout in job.layouts))


def outer_lines(job: Job, step: float, mbit: float | None) -> Iterator[str]:
    """Lines on the outer steps of a run whose steps take `step` seconds, over a link to the hub of `mbit`."""
    islands = job.islands
    share = BYTES[islands.outer_format]
    sent = share * parameter_count(job.model, job.vocab_size)
    taken = (islands.count - 1) * sent
    yield (
        f"an outer step of {islands.count} islands: each sends {decimal_bytes(sent)} and receives "
        f"{decimal_bytes(taken)} ({islands.outer_format}: {share:.4g} bytes per parameter)"
    )
    if mbit is None:
        yield "  give --plan-island-mbit for its time and the smallest --outer-interval"
        return
    seconds = (sent + taken) * 8 / (mbit * 1e6)  # one after the other: what is received has to be sent first
    overlap = max(1, math.ceil(seconds / step))
    alone = max(1, math.ceil((1 - _EXPOSED) / _EXPOSED * seconds / step))
    yield f"  at {mbit:,g} Mbit/s it takes {duration(seconds)}, {counted(overlap, 'step')} of this run; it is"
    yield f"    hidden from --outer-interval {overlap + 1} with --outer-overlap {overlap} on"
    yield f"    at most {_EXPOSED:.0%} of the time from --outer-interval {alone} without overlap on"
    waits = max(0.0, seconds - islands.outer_overlap * step)
    exposed = waits / (waits + islands.outer_interval * step)
    yield (
        f"  this run, --outer-interval {islands.outer_interval} and --outer-overlap {islands.outer_overlap}: "
        f"waits for {exposed:.1%} of the time"
    )
