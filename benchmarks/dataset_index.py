"""Seconds that Megatron-LM's sample order takes to build: here, and by megatron-core on the same files.

    pip install megatron-core==0.16.1
    python benchmarks/dataset_index.py [--documents N] [--epochs N] [--sets K …] [--rounds N]

A temporary data set is written whose index has N documents (10 million by default; their tokens are in a
sparse file, as no token is read), and both build its document, sample and shuffle index for some epochs; and
both draw blends of K data sets. Builds alternate, each from nothing into a new directory, files included; the
fastest round of each counts, by the clock and by the processor's time, so that other load on the machine
matters less. The indexes are compared. Ours are also opened again, which checks every byte.
"""

import contextlib
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file: the repository is not on the path

import numpy as np

from benchmarks.common import write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.data.indexed import HEADER, MAGIC, VERSION, IndexedDataset
from megatron_zpp.data.megatron.compiled_orders import compiled_orders
from megatron_zpp.data.megatron.dataset import MegatronOrders
from megatron_zpp.data.order_cache import OrderCache

SEQ_LENGTH, SEED, LONGEST = 2048, 1234, 2000  # tokens of a document: 0 to LONGEST


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """dataset index benchmark"""

    documents: int = option(10_000_000, "Documents of the data set.", at_least=1000)
    epochs: int = option(2, "Epochs of the order.", at_least=1)
    sets: tuple[int, ...] = option((2, 5, 10, 30), "Data sets of each blend.", at_least=2, at_most=1000)
    samples: int = option(20_000_000, "Samples of the blend.", at_least=1000)
    rounds: int = option(3, "Builds of each, of which the fastest counts.", at_least=1)


def write_index(prefix: str, documents: int) -> None:
    """PREFIX.idx of uint16 documents of random lengths, and a sparse PREFIX.bin."""
    lengths = np.random.default_rng(0).integers(0, LONGEST, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(prefix + ".idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for array in (lengths, ends - 2 * lengths, np.arange(documents + 1, dtype=np.int64)):
            array.tofile(file)
    with open(prefix + ".bin", "wb") as file:
        file.truncate(int(ends[-1]))


def reference(prefix: str, samples: int, cache: str) -> Any:
    """megatron-core's data set of so many samples, its indexes built into `cache`."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirIndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=([prefix], None),
        split="1",
        path_to_cache=cache,
        tokenizer=SimpleNamespace(vocab_size=50_000, eod=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    source = TheirIndexedDataset(prefix)
    indices = np.arange(len(source), dtype=np.int32)
    return GPTDataset(source, prefix, indices, samples, Split.train, config)


def orders(cache: str) -> MegatronOrders:
    """Our orders, built into `cache`."""
    store = OrderCache("--data-cache-path", cache, Path(cache), lambda line: None)
    return MegatronOrders(store, SEQ_LENGTH, 50_000, SEED, partial(compiled_orders, print))


def alternate(rounds: int, ours: Callable[[str], Any], theirs: Callable[[str], Any]) -> dict[str, Any]:
    """The fastest seconds of each builder and of reopening ours, and the results of the last round."""
    seconds: dict[str, list[float]] = {"ours": [], "megatron_core": [], "ours_opened_again": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}
    made: dict[str, Any] = {}

    def timed(name: str, build: Callable[[str], Any], cache: str) -> Any:
        begin, begin_processor = time.perf_counter(), time.process_time()
        result = build(cache)
        seconds[name].append(time.perf_counter() - begin)
        processor[name].append(time.process_time() - begin_processor)
        return result

    for _ in range(rounds):
        for name, build in (("ours", ours), ("megatron_core", theirs)):
            with tempfile.TemporaryDirectory() as cache:
                made[name] = timed(name, build, cache)
                if name == "ours":
                    timed("ours_opened_again", build, cache)
    fastest = [
        {name: round(min(taken), 3) for name, taken in times.items()} for times in (seconds, processor)
    ]
    return {"seconds": fastest[0], "processor_seconds": fastest[1], "made": made}


def measure_order(prefix: str, settings: Settings) -> dict[str, Any]:
    """The three indexes of one data set."""
    source = IndexedDataset(prefix)
    samples = settings.epochs * source.num_tokens // SEQ_LENGTH - 1
    result = alternate(
        settings.rounds,
        lambda cache: orders(cache).dataset(source, 0, source.num_sequences, samples, "train"),
        lambda cache: reference(prefix, samples, cache),
    )
    made = result["made"]
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(made["ours"].indexes[name], getattr(made["megatron_core"], name)), name
    return {"documents": source.num_sequences, "samples": samples, **_verdict(result)}


def measure_blend(settings: Settings, sets: int) -> dict[str, Any]:
    """The two indexes of a blend, whose data sets have only a length here."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.utils import Split

    class Source:
        """A stand-in for a data set with enough samples."""

        index_split, unique_identifiers = Split.train, {"name": "benchmark"}

        def __len__(self) -> int:
            return settings.samples

    weights = np.random.default_rng(1).random(sets).tolist()
    sources: list[Any] = [Source() for _ in weights]

    def theirs(cache: str) -> Any:
        config = SimpleNamespace(path_to_cache=None, defer_npy_index_mmap=False)
        dataset = BlendedDataset(sources, weights, settings.samples, config)
        for name in ("dataset_index", "dataset_sample_index"):  # what it does with a process group
            np.save(Path(cache) / f"{name}.npy", getattr(dataset, name))
        return dataset

    result = alternate(
        settings.rounds,
        lambda cache: orders(cache).blend(sources, weights, settings.samples, "train").blend,
        theirs,
    )
    made = result["made"]
    for name in ("dataset_index", "dataset_sample_index"):
        assert np.array_equal(made["ours"].indexes[name], getattr(made["megatron_core"], name)), name
    return {"sets": sets, "samples": settings.samples, **_verdict(result)}


def _verdict(result: dict[str, Any]) -> dict[str, Any]:
    times = {name: result[name] for name in ("seconds", "processor_seconds")}
    ratios = [round(taken["megatron_core"] / taken["ours"], 2) for taken in times.values()]
    return {**times, "times_as_fast": ratios[0], "times_as_fast_by_processor": ratios[1]}


def main() -> None:
    settings = parse_options(Settings, "dataset_index.py", __doc__, sys.argv[1:])
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        prefix = f"{stack.enter_context(tempfile.TemporaryDirectory())}/documents"
        write_index(prefix, settings.documents)
        figures = {
            "seq_length": SEQ_LENGTH,
            "epochs": settings.epochs,
            "order": measure_order(prefix, settings),
            "blends": [measure_blend(settings, sets) for sets in settings.sets],
        }
    write_result("dataset_index", figures)


if __name__ == "__main__":
    run_tool("dataset_index.py", main)
