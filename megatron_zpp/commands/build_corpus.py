"""Collects text as JSON lines, one document per line, from files or Python's source."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.command_line import command_options, unwind_on_sigterm
from megatron_zpp.config.options import REQUIRED, Options, UsageError, option
from megatron_zpp.config.values.text import JSON_LINES, plain_suffix
from megatron_zpp.data.corpus.json_lines import Report
from megatron_zpp.data.corpus.progress import Progress
from megatron_zpp.data.corpus.python_source import read_source, source_files, standard_library
from megatron_zpp.data.corpus.texts import Texts, find_texts, read_documents
from megatron_zpp.storage.files import check_replaceable, replacing


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Options):
    """corpus: text to JSON lines

    Without --input: the source of the running interpreter's standard library.
    """

    output: str = option(REQUIRED, "The file to write: .jsonl.")
    input: tuple[str, ...] = option(
        (), "Files, globs or directories of .txt (one document per file) and .jsonl, also .gz and .zst."
    )
    json_key: str = option("text", "The key of a .jsonl line that holds its document.", needs="--input")

    def check(self) -> None:
        """Require an output with a known suffix."""
        if not self.output.endswith(".jsonl"):
            raise self.error("output", "must end in .jsonl")


def main() -> None:
    if any(word.startswith("--hf-") for word in sys.argv[1:]):
        load = "datasets.load_dataset(NAME, split='train').to_json('corpus.jsonl')"
        raise UsageError(f"--hf-dataset: removed; in Python, {load} writes JSON lines of any data set")
    config = command_options(CorpusConfig, __doc__)
    unwind_on_sigterm()
    name, disk_bytes, documents = open_source(config)
    check_replaceable("--output", config.output)
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    with Progress("collecting", disk_bytes, every=1000) as progress, replacing(Path(config.output)) as output:
        report = Report(progress.say)
        for found in documents:
            report.add(found.problems, found.path)
            lines = [json_line(text, found.path) for text in found.texts]
            output.write(b"".join(lines))
            progress.advance(
                disk_bytes=found.disk_bytes, text_bytes=sum(map(len, lines)), documents=len(lines)
            )
        if not progress.documents:
            raise ValueError(f"{name}: no documents (skipped: {report.summary()})")
    print(
        f"{config.output}: {progress.documents:,} documents of {name}, "
        f"{os.path.getsize(config.output) / 1e6:,.1f} MB; skipped: {report.summary()}"
    )


def open_source(config: CorpusConfig) -> tuple[str, int, Iterator[Texts]]:
    """Return the name of the source, its bytes on disk and its text. Raises ValueError if there is none."""
    if config.input:
        files = find_texts("--input", config.input, output=config.output)
        documents = (texts for path in files for texts in read_documents(path, config.json_key))
        return f"{len(files):,} files", sum(map(os.path.getsize, files)), documents
    directory = standard_library()
    modules = source_files(directory)
    total = sum(file.stat().st_size for file in modules)
    return f"Python's standard library ({directory})", total, read_source(directory, modules)


def json_line(text: str, path: str) -> bytes:
    """Return the line of a document; it includes the path if the file is one document."""
    record = {"text": text}
    if plain_suffix(path) not in JSON_LINES:
        record["path"] = path
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
