"""Streams the documents of a Hugging Face data set."""

import itertools
from collections.abc import Iterator, Sequence

from megatron_zpp.config.options import option_error
from megatron_zpp.data.corpus.json_lines import NOT_TEXT
from megatron_zpp.data.corpus.problems import Problem
from megatron_zpp.data.corpus.texts import Texts, keep

_ROWS = 256  # rows per item yielded


def read_hub(name: str, config: str | None, split: str, key: str, files: Sequence[str]) -> Iterator[Texts]:
    """Yield the column `key` of a data set of the hub, or of local `files` of format `name`.

    Raises ValueError if the data set, split or column does not exist or cannot be read to its end.
    """
    rows = enumerate(_rows(name, config, split, files), start=1)
    while chunk := list(itertools.islice(rows, _ROWS)):
        texts: list[tuple[int, str]] = []
        problems: list[Problem] = []
        for number, row in chunk:
            if key not in row:
                raise option_error(
                    "--hf-text-key", key, f"{name} has no such column; it has {', '.join(row)}"
                )
            text = row[key]
            if isinstance(text, str):
                texts.append((number, text))
            else:
                problems.append(Problem(number, NOT_TEXT, f"{key!r} is {type(text).__name__}"))
        yield keep(name, texts, problems, disk_bytes=0)


def _rows(name: str, config: str | None, split: str, files: Sequence[str]) -> Iterator[dict[str, object]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            name, config, split=split, data_files=list(files) or None, streaming=True
        )
    except Exception as error:  # `datasets` passes on any error of its readers and the network
        raise option_error(
            "--hf-dataset",
            name,
            f"cannot be read ({type(error).__name__}: {error}); check name, network and --hf-data-files",
        ) from None
