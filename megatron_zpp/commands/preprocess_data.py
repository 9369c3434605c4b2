"""Tokenises JSON lines into the .bin/.idx files that training reads."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_zpp.config.command_line import command_groups, unwind_on_sigterm
from megatron_zpp.config.options import REQUIRED, Options, UsageError, count, option, option_error, switch
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.text import PARQUET, plain_suffix
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.corpus.inputs import TEXT, find_files
from megatron_zpp.data.corpus.json_lines import Report
from megatron_zpp.data.corpus.parallel_encode import encode_files
from megatron_zpp.data.corpus.progress import Progress
from megatron_zpp.data.indexed import index_path, token_dtype, tokens_path
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.provenance import provenance_path
from megatron_zpp.storage.files import check_replaceable
from megatron_zpp.tokenizer import build_tokenizer, describe


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Options):
    """preprocessing: JSON lines to PREFIX_KEY_document.bin and .idx"""

    input: tuple[str, ...] = option(REQUIRED, "JSON lines: files, globs or directories; also .gz and .zst.")
    output_prefix: str = option(REQUIRED, "Beginning of the names of the files to write.")
    json_keys: tuple[str, ...] = option(("text",), "Keys to encode; each becomes a separate data set.")
    append_eod: bool = switch("Append the tokenizer's end-of-document token to each document.")
    workers: int | None = count(None, "Processes that tokenise; by default one per core.", at_most=4096)
    partitions: int = count(
        1, "Accepted as in Megatron-LM, and without effect: all --workers share one input."
    )
    log_interval: int = count(1000, "Documents between two lines of progress if stderr is not a terminal.")
    strict: bool = switch("Stop at the first line without a document, and write nothing.")

    def check(self) -> None:
        """Require different keys that can be part of a file name."""
        for key in self.json_keys:
            if "/" in key:
                raise option_error("--json-keys", key, "becomes part of a file name and cannot contain a /")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise self.error("json_keys", "names a key twice")


def main() -> None:
    groups = {"preprocess": PreprocessConfig, "tokenizer": TokenizerConfig}
    parsed = command_groups(groups, __doc__)
    config, tokenizer_config = parsed["preprocess"], parsed["tokenizer"]
    if tokenizer_config.tokenizer_type is None:
        raise UsageError("the following arguments are required: --tokenizer-type")
    unwind_on_sigterm()
    files = find_files("--input", config.input)
    for path in files:
        if plain_suffix(path) in TEXT:
            raise option_error(
                "--input", path, "is text, not JSON lines; data/build_corpus.py --input converts it"
            )
        if path.endswith(PARQUET):
            fix = "--data-path of a run reads it, and datasets.load_dataset(…).to_json(…) converts it"
            raise option_error("--input", path, f"is Parquet, not JSON lines; {fix}")
    tokenizer = build_tokenizer(tokenizer_config)
    dtype, description = token_dtype(tokenizer.vocab_size), describe(tokenizer)
    build = partial(Encoder, tokenizer_config, config.json_keys, config.append_eod)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype, provenance=description))
            for prefix in output_prefixes(config)
        ]
        total = sum(os.path.getsize(path) for path in files)
        progress = stack.enter_context(Progress("tokenising", total, config.log_interval))
        report = Report(progress.say, strict=config.strict)
        if config.partitions > 1:
            progress.say("--partitions has no effect: all --workers share one input")
        workers = config.workers or len(os.sched_getaffinity(0))
        for encoded, block, path, before in encode_files(files, build, workers):
            for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths, strict=True):
                writer.add_documents(tokens, lengths)
            report.add(encoded.problems, path, before)
            progress.advance(
                disk_bytes=block.disk_bytes, text_bytes=len(block.content), documents=encoded.lengths[0].size
            )
        if not progress.documents:
            raise config.error("input", f"has no documents (skipped: {report.summary()})")
    for writer in writers:
        print(f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens")
    print(
        f"{progress.text_bytes / 1e6:,.1f} MB in {progress.seconds():.1f} s, {progress.rates()}; "
        f"skipped: {report.summary()}"
    )


def output_prefixes(config: PreprocessConfig) -> list[str]:
    """Return PREFIX_KEY_document for each key, and create their directory.

    Raises ValueError, before any work, if one of their files could not be written.
    """
    prefixes = [f"{config.output_prefix}_{key}_document" for key in config.json_keys]
    for prefix in prefixes:
        for name in (index_path, tokens_path, checksums_path, provenance_path):
            check_replaceable("--output-prefix", name(prefix))
    Path(prefixes[0]).parent.mkdir(parents=True, exist_ok=True)
    return prefixes
