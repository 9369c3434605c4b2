"""Tokens per second that a run gets from text as it tokenises it, beside the tokenizer alone.

Rounds alternate between the tokenizer alone in one process, and a loader that reads an epoch of the text, of
which nothing is kept yet. The processor seconds of a loader are those of its workers, with all that they
read, cut and hand over; on a machine that does other work they alone are worth reading.
"""

import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

import numpy as np

from benchmarks.common import write_result
from benchmarks.preprocess import Times, best_seconds, run_data_tool, tokenizers_alone
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.text.open import OpenText, open_text
from megatron_zpp.tokenizer import build_tokenizer, describe

SEQ_LENGTH, MICRO_BATCH = 1024, 4


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Options):
    """benchmark: samples of the standard library's source, as text"""

    workers: tuple[int, ...] = option((1, 2), "Workers of the loader; each number is measured.", at_least=1)
    rounds: int = option(
        3, "Rounds, of which the best counts: other work on the machine only ever slows.", at_least=1
    )
    vocab_size: int = option(4096, "Of the SentencePiece model that is trained for it.", at_least=512)


def main() -> None:
    config = parse_options(BenchmarkConfig, "text.py", __doc__, sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        corpus, prefix = f"{directory}/corpus.jsonl", f"{directory}/tokenizer"
        run_data_tool("build_corpus.py", f"--output={corpus}")
        size = f"--vocab-size={config.vocab_size}"
        run_data_tool("train_tokenizer.py", f"--input={corpus}", size, f"--output-prefix={prefix}")
        alone: list[Times] = []
        loaders: dict[int, list[Times]] = {workers: [] for workers in config.workers}
        for number in range(config.rounds):
            alone += tokenizers_alone(corpus, f"{prefix}.model", processes=1)
            for workers in config.workers:
                open_anew = partial(open_corpus, corpus, prefix, f"{directory}/{number}-{workers}")
                loaders[workers].append(read_epoch(open_anew, workers))
        text = open_corpus(corpus, prefix, f"{directory}/0-{config.workers[0]}", 0)
        tokens = int(text.cache.counts(np.arange(text.blocks)).sum())
        megabytes = Path(corpus).stat().st_size / 1e6
    best = min(one.processor for one in alone)
    write_result(
        "text",
        {
            "corpus_mb": round(megabytes, 1),
            "tokens": tokens,
            "tokenizer": f"SentencePiece {config.vocab_size}",
            "tokenizer_alone": figures(alone, tokens, 1, best),
            "loader": [figures(times, tokens, workers, best) for workers, times in loaders.items()],
        },
    )


def open_corpus(corpus: str, prefix: str, cache: str, workers: int) -> OpenText:
    """The text as a run opens it."""
    tokenizer = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=f"{prefix}.model")
    data = DataConfig(data_path=(corpus,), data_cache_path=cache, num_workers=workers)
    description = describe(build_tokenizer(tokenizer))
    return open_text(
        "--data-path", corpus, data=data, tokenizer=tokenizer, description=description, say=print
    )


def read_epoch(open_anew: Any, workers: int) -> Times:
    """Times of reading all samples once, including opening the text."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    text = open_anew(workers)
    samples = text.samples("train", (0, text.blocks), SEQ_LENGTH, 1, 1)
    with MicroBatches(
        samples, BatchSchedule(MICRO_BATCH, MICRO_BATCH, 1), rank=0, num_workers=workers
    ) as batches:
        stream = iter(batches)
        while (text.cache.counts(np.arange(text.blocks)) < 0).any():
            next(stream)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Times(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def figures(times: list[Times], tokens: int, processes: int, alone: float) -> dict[str, Any]:
    """Of the best round; `alone` are the tokenizer's processor seconds."""
    busy = min(one.processor for one in times)
    return {
        "processes": processes,
        "tokens_per_second": round(tokens / best_seconds(times)),
        "tokens_per_processor_second": round(tokens / busy),
        "ratio_to_the_tokenizer_alone": round(alone / busy, 3),
        "seconds_of_each_round": [round(one.seconds, 2) for one in times],
    }


if __name__ == "__main__":
    run_tool("text.py", main)
