"""Data sets of Megatron-LM and ours have the same bytes, and each program reads the other's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from tests.data import megatron_core

DOCUMENTS = [[5, 3, 2], [], [7] * 1000, [0], list(range(500))]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32], ids=["uint16", "int32"])
def test_files_are_the_same_bytes(tmp_path, dtype):
    """So each program reads the other's."""
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    with IndexedDatasetWriter(ours, dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    builder = megatron_core.core().IndexedDatasetBuilder(theirs + ".bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(theirs + ".idx")
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
