"""Collects text into JSON lines, one document a line: from files, from a hub, or from Python's own source."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory, not installed

from megatron_zpp.config.command_line import run_tool, unwind_on_sigterm
from megatron_zpp.config.options import REQUIRED, Options, option, option_error, parse_options
from megatron_zpp.config.text import JSON_LINES, plain_suffix
from megatron_zpp.data.corpus.compression import replacing
from megatron_zpp.data.corpus.hub import read_hub
from megatron_zpp.data.corpus.inputs import find_files
from megatron_zpp.data.corpus.problems import Report
from megatron_zpp.data.corpus.progress import Progress
from megatron_zpp.data.corpus.python_source import read_source, source_files, standard_library
from megatron_zpp.data.corpus.texts import Texts, check_suffix, read_documents
from megatron_zpp.storage.files import check_replaceable

PROG = "build_corpus.py"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Options):
    """corpus: text to JSON lines

    Without --input and --hf-dataset: the source of the running interpreter's standard library.
    """

    output: str = option(REQUIRED, "The file to write: .jsonl, .jsonl.gz or .jsonl.zst.")
    input: tuple[str, ...] = option(
        (), "Files, globs or directories of .txt (one document a file) and .jsonl, also .gz and .zst."
    )
    json_key: str = option("text", "The key of a .jsonl line that holds its document.")
    hf_dataset: str | None = option(None, "A data set of the Hugging Face hub, or json, parquet or text.")
    hf_config: str | None = option(None, "Which configuration of it.")
    hf_split: str = option("train", "Which split of it.")
    hf_text_key: str = option("text", "Which column of it.")
    hf_data_files: tuple[str, ...] = option((), "Local files, where --hf-dataset is json, parquet or text.")

    def check(self) -> None:
        """One source; its own flags only; an output that says what it is."""
        if not self.output.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
            raise option_error("--output", self.output, "must end in .jsonl, .jsonl.gz or .jsonl.zst")
        if self.input and self.hf_dataset:
            raise option_error(
                "--hf-dataset", self.hf_dataset, "cannot be joined with --input; give one of them"
            )
        for flag, value in (
            ("--hf-config", self.hf_config),
            ("--hf-data-files", self.hf_data_files),
            ("--hf-split", self.hf_split if self.hf_split != "train" else None),
            ("--hf-text-key", self.hf_text_key if self.hf_text_key != "text" else None),
        ):
            if value and not self.hf_dataset:
                raise option_error(flag, value, "has no meaning without --hf-dataset")
        if self.json_key != "text" and not self.input:
            raise option_error("--json-key", self.json_key, "has no meaning without --input")


@dataclass(frozen=True)
class Source:
    """Where the text comes from."""

    name: str
    disk_bytes: int | None  # None when nobody knows
    texts: Iterator[Texts]


def main() -> None:
    config = parse_options(CorpusConfig, PROG, __doc__, sys.argv[1:])
    unwind_on_sigterm()
    source = open_source(config)
    check_replaceable("--output", config.output)
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    with (
        Progress("collecting", source.disk_bytes, every=1000) as progress,
        replacing(config.output) as output,
    ):
        report = Report(progress.say)
        for found in source.texts:
            report.add(found.problems, lambda problem, path=found.path: f"{path} line {problem.line}")
            lines = [json_line(text, found.path, config) for text in found.texts]
            output.write(b"".join(lines))
            progress.advance(
                disk_bytes=found.disk_bytes, text_bytes=sum(map(len, lines)), documents=len(lines)
            )
        if not progress.documents:
            raise ValueError(f"{source.name}: no documents (left out: {report.summary()})")
    print(
        f"{config.output}: {progress.documents:,} documents of {source.name}, "
        f"{os.path.getsize(config.output) / 1e6:,.1f} MB; left out: {report.summary()}"
    )


def open_source(config: CorpusConfig) -> Source:
    """Raises ValueError when there is no such source."""
    if config.input:
        files = find_files("--input", config.input)
        for path in files:
            check_suffix("--input", path)
        documents = (texts for path in files for texts in read_documents(path, config.json_key))
        return Source(f"{len(files):,} files", sum(map(os.path.getsize, files)), documents)
    if config.hf_dataset:
        rows = read_hub(
            config.hf_dataset, config.hf_config, config.hf_split, config.hf_text_key, config.hf_data_files
        )
        return Source(config.hf_dataset, None, rows)
    directory = standard_library()
    modules = source_files(directory)
    total = sum(file.stat().st_size for file in modules)
    return Source(f"Python's standard library ({directory})", total, read_source(directory, modules))


def json_line(text: str, path: str, config: CorpusConfig) -> bytes:
    """The document's line; it says which file it came from where a file is a document."""
    record = {"text": text}
    if not config.hf_dataset and plain_suffix(path) not in JSON_LINES:
        record["path"] = path
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


if __name__ == "__main__":
    run_tool(PROG, main)
