"""Best-fit packing beside concatenation: padding, documents that are cut, and the loader's rate.

python benchmarks/packing.py DIRECTORY --seq-lengths 2048 4096   all PREFIX.bin/.idx under the directory
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import write_result
from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.open import open_splits
from megatron_zpp.data.packing import best_fit, cut_documents
from megatron_zpp.data.samples import Samples

MASKS: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
MICRO_BATCH = 8


def cut_by_concatenation(prefixes: list[str], seq_length: int) -> int:
    """Documents that a window's edge divides, if windows begin at the first token of each data set."""
    cut = 0
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        starts, ends = data.token_ranges(np.arange(data.num_sequences))
        cut += int(((ends - 1) // seq_length > starts // seq_length).sum())
    return cut


def tokens_per_second(samples: Samples, seq_length: int, seconds: float) -> float:
    """Tokens that one process reads per second, in random micro-batches."""
    samples.batch(np.arange(MICRO_BATCH))
    begin, read = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        samples.batch(np.arange(read, read + MICRO_BATCH))
        read += MICRO_BATCH
    return read * seq_length / (time.perf_counter() - begin)


def measure(prefixes: list[str], seq_length: int, seconds: float) -> dict:
    """Figures of one sequence length; rates are alternated, and the best of three is kept."""
    tokenizer = json.loads(Path(f"{prefixes[0]}.tokenizer.json").read_text())
    with tempfile.TemporaryDirectory() as cache:
        configs = {
            "concatenation": DataConfig(train_data_path=tuple(prefixes)),
            "concatenation_masked": DataConfig(train_data_path=tuple(prefixes), **MASKS),
            "best_fit": DataConfig(
                train_data_path=tuple(prefixes), dataset_packing="best-fit", data_cache_path=cache
            ),
        }
        opened, opening = {}, {}
        for name, config in configs.items():
            begin = time.perf_counter()
            train = open_splits(
                config,
                seq_length=seq_length,
                vocab_size=tokenizer["vocab_size"],
                seed=1,
                tokenizer_description=tokenizer,
                needed=("train",),
            ).train
            assert train is not None
            opened[name], opening[name] = train, round(time.perf_counter() - begin, 3)
        rates = [
            {name: tokens_per_second(each, seq_length, seconds) for name, each in opened.items()}
            for _ in range(3)
        ]
        blend = opened["best_fit"].samples  # type: ignore[attr-defined]
        parts = getattr(blend, "sources", (blend,))
        documents, cut, predictions = sum(part.indexes["counts"][:] for part in parts).tolist()
    samples = sum(part.windows_per_epoch for part in parts)
    return {
        "seq_length": seq_length,
        "documents": documents,
        "predictions": predictions,
        "best_fit_samples": samples,
        "padding": 1 - predictions / (samples * seq_length),
        "cut_documents": {"best_fit": cut, "concatenation": cut_by_concatenation(prefixes, seq_length)},
        "seconds_to_open": opening,
        "tokens_per_second": {name: round(max(rate[name] for rate in rates)) for name in configs},
    }


def index_seconds(documents: int, seq_length: int) -> dict:
    """Seconds to pack documents of log-normal lengths, and the padding that is left."""
    sizes = np.random.default_rng(0).lognormal(6, 1.3, documents).astype(np.int64).clip(2)
    begin = time.perf_counter()
    _, lengths = cut_documents(np.concatenate([[0], np.cumsum(sizes)]), seq_length)
    bins = best_fit(lengths, seq_length)
    np.argsort(bins, kind="stable")
    seconds = time.perf_counter() - begin
    padding = 1 - lengths.sum() / ((bins.max() + 1) * seq_length)
    return {"documents": documents, "seq_length": seq_length, "seconds": seconds, "padding": padding}


def main() -> None:
    """Measure each sequence length and write results/packing.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pattern", default="training-*.idx", help="files of the data sets")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each rate")
    parser.add_argument("--packed-documents", type=int, default=10_000_000)
    given = parser.parse_args()
    prefixes = [str(path.with_suffix("")) for path in sorted(given.directory.glob(given.pattern))]
    figures = {
        "data_sets": len(prefixes),
        "corpus": [measure(prefixes, length, given.seconds) for length in given.seq_lengths],
        "index": index_seconds(given.packed_documents, 4096),
    }
    write_result("packing", figures)


if __name__ == "__main__":
    main()
