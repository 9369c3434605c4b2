"""Checks every token of a run's data against its checksums before the first step."""

import time

from megatron_zpp.config.command_line import one_line
from megatron_zpp.data.open import Splits
from megatron_zpp.data.verify import verify_tokens
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import DamagedFile


def verify_data(splits: Splits, exchange: Exchange) -> str:
    """Read every .bin, one part per rank, and return a line for the log; every rank must call it.

    Raises DamagedFile on every rank if any rank finds damage or cannot read.
    """
    started, topology, problem = time.perf_counter(), exchange.topology, None
    try:
        verify_tokens(splits.files, topology.rank, topology.world_size, exchange.progress)
    except (DamagedFile, OSError) as error:
        problem = one_line(error)
    problems = [problem for problem in exchange.all_gather("problem", problem) if problem]
    if problems:
        raise DamagedFile(problems[0])
    size = sum(data.tokens.nbytes for data in splits.files)
    return f" verified {size:,} bytes of tokens in {time.perf_counter() - started:.1f} s"
