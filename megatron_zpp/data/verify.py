"""Whether data sets still are what was written, byte by byte."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from megatron_zpp.data.indexed import IndexedDataset, tokens_path, unlike_what_was_written
from megatron_zpp.storage.checksums import DamagedFile, OnProgress, VerifiedFile, no_report

_THREADS = 4  # that read and hash; both leave Python's lock


def verify_tokens(
    datasets: Sequence[IndexedDataset], part: int, parts: int, on_progress: OnProgress = no_report
) -> None:
    """Reads one of `parts` equal parts of all .bin files together and checks it; each data set has checksums.

    Raises DamagedFile with file, place and fix; OSError as the file system does.
    """
    chunks = [len(data.checksums.tokens.digests) for data in datasets]
    begin, end = (sum(chunks) * edge // parts for edge in (part, part + 1))
    first = 0  # of this file's chunks, among all
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        for data, count in zip(datasets, chunks, strict=True):
            mine = range(max(begin - first, 0), min(end - first, count))
            first += count
            try:
                path = Path(tokens_path(data.prefix))
                with closing(VerifiedFile(path, data.checksums.tokens, on_progress)) as file:
                    file.check(mine, pool.map)
            except DamagedFile as damage:
                raise unlike_what_was_written(data.prefix, damage) from None
