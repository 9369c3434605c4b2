"""Reads all tokens of a run before it begins, for --verify-data."""

import time
from functools import partial

from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.together import read_together
from megatron_zpp.data.indexed import verify_tokens
from megatron_zpp.data.open import Splits
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import DamagedFile


def verify_data(splits: Splits, exchange: Exchange) -> str:
    """Read every .bin, one part per rank, and return a line for the log; every rank must call it.

    Raises DamagedFile on every rank if any rank finds damage, ValueError if any cannot read or makes no
    progress.
    """
    started, topology = time.perf_counter(), exchange.topology
    verify = partial(verify_tokens, splits.files, topology.rank, topology.world_size)
    _, problem = read_together(verify, exchange, FileWorker(), "--verify-data", "(given)")
    if problem:
        raise DamagedFile(problem)
    size = sum(data.tokens.nbytes for data in splits.files)
    return f" verified {size:,} bytes of tokens in {time.perf_counter() - started:.1f} s"
