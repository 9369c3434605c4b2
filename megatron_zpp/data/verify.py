"""Compares the tokens of data sets with their checksums."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from megatron_zpp.data.checksums import changed_since_written
from megatron_zpp.data.indexed import IndexedDataset, tokens_path
from megatron_zpp.storage.checksums import DamagedFile, OnProgress, VerifiedFile, no_report, thread_count
from megatron_zpp.storage.location import location


def verify_tokens(
    datasets: Sequence[IndexedDataset], part: int, parts: int, on_progress: OnProgress = no_report
) -> None:
    """Read and check one of `parts` equal parts of all .bin files together; every data set has checksums.

    Raises DamagedFile with the file, the offset and a remedy; OSError from the file system.
    """
    written = [data.checksums.tokens for data in datasets if data.checksums]
    chunks = [len(checksums.digests) for checksums in written]
    begin, end = (sum(chunks) * edge // parts for edge in (part, part + 1))
    first = 0  # index of this file's first chunk among the chunks of all files
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="verify") as pool:
        for data, checksums, count in zip(datasets, written, chunks, strict=True):
            mine = range(max(begin - first, 0), min(end - first, count))
            first += count
            try:
                path = location(tokens_path(data.prefix))
                with closing(VerifiedFile(path, checksums, on_progress)) as file:
                    file.check(mine, pool.map)
            except DamagedFile as damage:
                raise changed_since_written(data.prefix, damage) from None
