"""Tokens per second that one process gets from the data loader, with the data in the page cache.

    python benchmarks/data_loader.py [--tokens N] [--seconds S]

A temporary data set of uint16 tokens (1 GB by default) is written, read once so that it lies in the page
cache, and then read as micro-batches of 16 × 1024 tokens: by the rank itself and by 1 and 2 workers. The
target is 10 million tokens/s.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file: the repository is not on the path

import numpy as np

from benchmarks.common import write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.windows import WindowDataset

SEQ_LENGTH, MICRO_BATCH, VOCABULARY = 1024, 16, 50_257
DOCUMENT = 1000  # tokens
TARGET = 10e6  # tokens/s


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """data loader benchmark"""

    tokens: int = option(500_000_000, "Size of the data set; two bytes each.", at_least=1_000_000)
    seconds: float = option(10.0, "Time of each measurement.", above=0)


def write_data(prefix: str, tokens: int) -> dict[str, float]:
    """Write random tokens; return the rate."""
    chunk = np.random.default_rng(0).integers(0, VOCABULARY, 1_000_000, dtype=np.uint16)
    begin = time.perf_counter()
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(tokens // chunk.size):
            writer.add_documents(chunk, np.full(chunk.size // DOCUMENT, DOCUMENT))
    return {"mb_per_second": round(writer.num_tokens * 2 / 1e6 / (time.perf_counter() - begin), 1)}


def open_data(prefix: str) -> tuple[IndexedDataset, dict[str, float]]:
    """Open the data set and read it once; return the seconds that the checks took."""
    begin = time.perf_counter()
    data = IndexedDataset(prefix)
    elapsed = time.perf_counter() - begin
    for chunk in data.tokens.chunks():
        chunk.max()
    return data, {"sequences": data.num_sequences, "milliseconds": round(elapsed * 1e3, 2)}


def measure(samples: WindowDataset, num_workers: int, seconds: float) -> dict[str, Any]:
    """Tokens per second after the workers have started and their read-ahead is used up."""
    schedule = BatchSchedule(MICRO_BATCH, MICRO_BATCH, data_parallel_size=1)
    with MicroBatches(samples, schedule, rank=0, num_workers=num_workers) as batches:
        stream = iter(batches)
        for _ in range(100):
            next(stream)
        count, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            next(stream)
            count += 1
    rate = count * MICRO_BATCH * SEQ_LENGTH / elapsed
    return {"num_workers": num_workers, "tokens_per_second": round(rate), "reaches_target": rate >= TARGET}


def main() -> None:
    settings = parse_options(Settings, "data_loader.py", __doc__, sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        prefix = f"{directory}/random"
        written = write_data(prefix, settings.tokens)
        data, opened = open_data(prefix)
        samples = WindowDataset(data, 0, data.num_tokens, SEQ_LENGTH, VOCABULARY, seed=1234)
        figures = {
            "tokens": data.num_tokens,
            "seq_length": SEQ_LENGTH,
            "micro_batch_size": MICRO_BATCH,
            "write": written,
            "open": opened,
            "read": [measure(samples, num_workers, settings.seconds) for num_workers in (0, 1, 2)],
        }
    write_result("data_loader", figures)


if __name__ == "__main__":
    run_tool("data_loader.py", main)
