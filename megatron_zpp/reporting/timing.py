"""Times of the parts of a step over all ranks, for the log, and the slowest rank."""

from collections.abc import Sequence
from statistics import median

import torch

from megatron_zpp.config.run import TimingConfig
from megatron_zpp.reporting.metrics import Record
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.sections import WAITS

STEP, BATCH, FORWARD_BACKWARD, OPTIMIZER = "step", "batch-generator", "forward-backward", "optimizer"
LEVEL_1 = (BATCH, FORWARD_BACKWARD, OPTIMIZER)
_SLOW = 1.1  # ratio to the median above which a rank is named as slow


def report_times(config: TimingConfig, engine: ZeroEngine, steps: int) -> tuple[Record, list[str]]:
    """Numbers and log lines for the steps since the last report; every rank must call it."""
    if not engine.sections.timed:
        return {}, []
    seconds = engine.sections.take()
    names, topology, level = list(seconds), engine.topology, int(config.timing_log_level)
    table = torch.zeros(topology.world_size, len(names), dtype=torch.float64, device=engine.device)
    own = [1000 * seconds[name] / steps for name in names]
    table[topology.rank] = torch.tensor(own, dtype=torch.float64)
    by_name = dict(zip(names, engine.sum_over_ranks(table).T.tolist(), strict=True))
    shown = {0: [], 1: LEVEL_1, 2: [name for name in names if name != STEP]}[level]
    record: Record = {f"time_{name.replace('-', '_')}_ms": max(by_name[name]) for name in shown}
    lines = [times_line({name: by_name[name] for name in shown})] if level else []
    if config.log_straggler:
        waits = zip(*(by_name.get(name, [0.0] * len(table)) for name in WAITS), strict=True)
        busy = [step - sum(waited) for step, waited in zip(by_name[STEP], waits, strict=True)]
        sharing = engine.mesh.tensor_ranks * engine.mesh.context_ranks
        lines.append(straggler_line(busy, by_name[STEP], sharing))
        record["straggler_rank"] = busy.index(max(busy))
        record["straggler_busy_ms"] = max(busy)
    return record, lines


def times_line(by_name: dict[str, Sequence[float]]) -> str:
    """One line with the minimum and maximum over ranks, in milliseconds per step."""
    parts = (f"{name}: ({min(values):.2f}, {max(values):.2f})" for name, values in by_name.items())
    return f" (min, max) time across ranks (ms): {' | '.join(parts)}"


def straggler_line(busy: Sequence[float], steps: Sequence[float], sharing: int) -> str:
    """One line on the milliseconds per step in which each rank did not wait for others.

    Each `sharing` consecutive ranks wait for each other inside layers, which counts as busy.
    """
    usual, most = median(busy), max(busy)
    rank = list(busy).index(most)
    named = f"rank {rank}"
    if sharing > 1:
        first = rank - rank % sharing
        named = f"one of ranks {first} to {first + sharing - 1}, which wait for each other inside layers,"
    verdict = f"{named} is the slowest" if most > _SLOW * usual else "no rank stands out"
    if sharing == len(busy) > 1:
        verdict = "all ranks wait for each other inside layers, so the slowest cannot be named"
    return (
        f" busy of {max(steps):.1f} ms per step: median {usual:.1f} ms, least {min(busy):.1f} ms, most "
        f"{most:.1f} ms on rank {rank}: {verdict}"
    )
