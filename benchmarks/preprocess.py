"""How much of the tokenizer's own speed data/preprocess_data.py delivers, in MB/s of JSON lines.

Rounds alternate between the tokenizer alone in one process, the tokenizer alone in as many processes as the
tool has workers (what the machine can do at all), and the tool from its start to its exit. On a machine with
other load only the processor seconds are meaningful.
"""

import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

from benchmarks.common import write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.inputs import read_blocks, whole
from megatron_zpp.data.corpus.json_lines import parse_lines, split_lines
from megatron_zpp.data.corpus.parallel_encode import BLOCK_BYTES
from megatron_zpp.data.corpus.problems import Problem
from megatron_zpp.tokenizer import build_tokenizer
from megatron_zpp.tokenizer.train_sentencepiece import ModelType

TOOLS = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Options):
    """benchmark: preprocessing of the standard library's source"""

    workers: int = option(2, "Workers of the tool.", at_least=1)
    rounds: int = option(
        3, "Rounds, of which the best counts: other work on the machine only ever slows.", at_least=1
    )
    copies: int = option(
        3, "Copies of the source in the corpus: more hide the start of the processes.", at_least=1
    )
    vocab_size: int = option(4096, "Of the SentencePiece model that is trained for it.", at_least=512)
    model_type: ModelType = option("bpe", "Kind of that model.")


@dataclass(frozen=True)
class Times:
    """What tokenising the corpus once took."""

    seconds: float  # on the wall
    processor: float  # seconds of all its processes


def main() -> None:
    config = parse_options(BenchmarkConfig, "preprocess.py", __doc__, sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        corpus, model = f"{directory}/corpus.jsonl", f"{directory}/tokenizer.model"
        run_data_tool("build_corpus.py", f"--output={corpus}")
        run_data_tool(
            "train_tokenizer.py",
            f"--input={corpus}",
            f"--vocab-size={config.vocab_size}",
            f"--model-type={config.model_type}",
            f"--output-prefix={model.removesuffix('.model')}",
        )
        Path(corpus).write_bytes(Path(corpus).read_bytes() * config.copies)
        size = Path(corpus).stat().st_size / 1e6
        alone, together, tool = [], [], []
        for _ in range(config.rounds):
            alone += tokenizers_alone(corpus, model, processes=1)
            together.append(slowest(tokenizers_alone(corpus, model, config.workers)))
            tool.append(preprocess(corpus, model, config.workers))
    alone_speed, ceiling, reached = (size / best_seconds(times) for times in (alone, together, tool))
    busy_alone, busy_tool = (min(one.processor for one in times) for times in (alone, tool))
    write_result(
        "preprocess",
        {
            "corpus_mb": round(size, 1),
            "workers": config.workers,
            "tokenizer": f"SentencePiece {config.model_type} {config.vocab_size}",
            "tokenizer_alone_mb_per_s": round(alone_speed, 2),
            "tokenizer_alone_in_all_workers_mb_per_s": round(ceiling * config.workers, 2),
            "preprocess_data_mb_per_s": round(reached, 2),
            "seconds_of_each_round": {
                "tokenizer_alone": [round(times.seconds, 2) for times in alone],
                "tokenizer_alone_in_all_workers": [round(times.seconds, 2) for times in together],
                "preprocess_data": [round(times.seconds, 2) for times in tool],
            },
            "processor_seconds_tokenizer_alone": round(busy_alone, 2),
            "processor_seconds_preprocess_data": round(busy_tool, 2),
            "ratio_of_processor_seconds": round(busy_alone / busy_tool, 3),
            "ratio_to_all_workers_alone": round(reached / (ceiling * config.workers), 3),
            "ratio_to_one_process_times_workers": round(reached / (alone_speed * config.workers), 3),
        },
    )


def best_seconds(times: list[Times]) -> float:
    """Of the rounds."""
    return min(one.seconds for one in times)


def slowest(times: list[Times]) -> Times:
    """The slowest process."""
    return max(times, key=lambda one: one.seconds)


def run_data_tool(name: str, *arguments: str) -> None:
    """Raises CalledProcessError if it fails; its output goes to the terminal."""
    subprocess.run([sys.executable, str(TOOLS / name), *arguments], check=True)


def preprocess(corpus: str, model: str, workers: int) -> Times:
    """Times of the tool from start to exit, with the start of its workers and the flush to disk."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    run_data_tool(
        "preprocess_data.py",
        f"--input={corpus}",
        f"--output-prefix={corpus}",
        f"--workers={workers}",
        "--tokenizer-type=SentencePieceTokenizer",
        f"--tokenizer-model={model}",
        "--append-eod",
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Times(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def tokenizers_alone(corpus: str, model: str, processes: int) -> list[Times]:
    """Times of each of so many processes that tokenise the corpus in parallel."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    team = [
        context.Process(target=_tokenise, args=(corpus, model, barrier, results)) for _ in range(processes)
    ]
    for process in team:
        process.start()
    for process in team:
        process.join()
    return [results.get() for _ in team]


def _tokenise(corpus: str, model: str, barrier: Any, results: Any) -> None:
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    )
    batches = [
        [_text(parsed) for parsed in parse_lines(split_lines(block.content), ["text"])]
        for block in read_blocks(whole(corpus), BLOCK_BYTES)
    ]
    barrier.wait()
    start, busy = time.perf_counter(), time.process_time()
    for batch in batches:
        tokenizer.encode_batch(batch)
    results.put(Times(time.perf_counter() - start, time.process_time() - busy))


def _text(parsed: tuple[int, list[str]] | Problem) -> str:
    if isinstance(parsed, Problem):
        raise ValueError(f"line {parsed.line}: {parsed.detail}")
    return parsed[1][0]


if __name__ == "__main__":
    run_tool("preprocess.py", main)
