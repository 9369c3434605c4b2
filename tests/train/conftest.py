"""A small data set of real text, as bytes, for whole runs."""

import inspect
import re
import tokenize

import numpy as np
import pytest

from megatron_zpp.data.indexed_writer import IndexedDatasetWriter

BYTES = "--tokenizer-type NullTokenizer --vocab-size 256".split()
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 "
    "--lr 3e-3 --log-interval 1 --eval-iters 2 --eval-interval 1000"
).split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a data set whose documents are the top-level definitions of `tokenize` and `inspect`."""
    text = inspect.getsource(tokenize) + inspect.getsource(inspect)
    documents = [np.frombuffer(part.encode(), np.uint8) for part in re.split(r"\n(?=def |class )", text)]
    prefix = str(tmp_path_factory.mktemp("corpus") / "bytes")
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.add_document(np.append(document.astype(np.uint16), 256))
    return prefix


@pytest.fixture
def flags(corpus: str) -> list[str]:
    """A tiny model on that corpus; a test adds how long to train."""
    return ["--data-path", corpus, "--split", "80,10,10", *BYTES, *TINY]
