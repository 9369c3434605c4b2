"""Trains a SentencePiece tokenizer on text files or JSON lines."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.command_line import command_options, unwind_on_sigterm
from megatron_zpp.config.options import REQUIRED, Options, count, option
from megatron_zpp.data.corpus.json_lines import Report
from megatron_zpp.data.corpus.progress import Progress
from megatron_zpp.data.corpus.sample import sample_text
from megatron_zpp.data.corpus.texts import find_texts, read_documents
from megatron_zpp.storage.files import check_replaceable, write_whole
from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_zpp.tokenizer.train_sentencepiece import ModelType, train_sentencepiece


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(Options):
    """tokenizer training: text to PREFIX.model"""

    input: tuple[str, ...] = option(
        REQUIRED, "Files, globs or directories of .txt and .jsonl, also .gz and .zst."
    )
    vocab_size: int = count(REQUIRED, "Number of ids.", at_most=2**31 - 1)
    output_prefix: str = option(REQUIRED, "The file to write, without .model.")
    model_type: ModelType = option("bpe", "bpe, or unigram: slower to train, faster to encode.")
    json_key: str = option("text", "The key of a .jsonl line that holds its document.")
    max_train_mib: int = count(4, "MiB of text to train on; from a larger input, a uniform sample is drawn.")


def main() -> None:
    config = command_options(TrainTokenizerConfig, __doc__)
    unwind_on_sigterm()
    files = find_texts("--input", config.input)
    path = f"{config.output_prefix}.model"
    check_replaceable("--output-prefix", path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Progress("sampling", sum(map(os.path.getsize, files)), every=10_000) as progress:
        report = Report(progress.say)
        sample = sample_text(read(files, config.json_key, progress, report), config.max_train_mib << 20)
    size = sum(len(chunk.encode()) for chunk in sample)
    print(
        f"training {config.vocab_size:,} {config.model_type} pieces on {size / 2**20:.1f} MiB ...", flush=True
    )
    start = time.monotonic()
    model = train_sentencepiece(sample, config.vocab_size, config.model_type)
    write_whole(Path(path), model)
    print(
        f"{path}: {config.vocab_size:,} pieces after {time.monotonic() - start:.1f} s; "
        f"{bytes_per_token(path, sample):.2f} bytes per token; skipped: {report.summary()}"
    )


def read(files: list[str], json_key: str, progress: Progress, report: Report) -> Iterator[str]:
    """Yield the text of all files, in order."""
    for path in files:
        for found in read_documents(path, json_key, parts=True):
            report.add(found.problems, found.path)
            yield from found.texts
            size = sum(len(text.encode()) for text in found.texts)
            progress.advance(disk_bytes=found.disk_bytes, text_bytes=size, documents=len(found.texts))


def bytes_per_token(model: str, sample: list[str]) -> float:
    """Return the bytes per token of the model on a part of its training text."""
    part = sample[:: max(1, len(sample) // 32)]
    tokens = SentencePieceTokenizer(model).encode_batch(part)
    return sum(len(text.encode()) for text in part) / max(1, sum(map(len, tokens)))
