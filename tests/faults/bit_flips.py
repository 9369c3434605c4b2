"""Files of a checkpoint and of a data set of which a bit is flipped, or the end is missing."""

import random
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.verify import verify_tokens
from tests.checkpoint.saving import save, small, train
from tests.faults.tally import Tally


def read_checkpoint(directory: Path) -> None:
    """Read and check all of the newest checkpoint, as the ranks of a run do together."""
    with CheckpointReader(candidates(str(directory))[0]) as reader:
        reader.check_rest(0, 1)


def read_data(prefix: str) -> None:
    """Opens a data set and checks its tokens, as --verify-data does."""
    verify_tokens([IndexedDataset(prefix)], 0, 1)


def flip_bits(directory: Path, tally: Tally, draw: random.Random, flips: int) -> None:
    """Flips bits in every file of a checkpoint and of a data set, and cuts them: each must be found."""
    engine = small()
    train(engine, 1, seed=2)
    path, prefix = save(directory / "flips", engine), str(directory / "data")
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for length in range(200):
            writer.add_document(list(range(length)))
    readers = dict.fromkeys(path.iterdir(), partial(read_checkpoint, path.parent))
    readers |= {Path(f"{prefix}.{kind}"): partial(read_data, prefix) for kind in ("idx", "bin")}
    files = list(readers)
    for number in range(flips):
        file = files[number % len(files)]
        content = file.read_bytes()
        changed = bytearray(content)
        if draw.random() < 0.9:
            bit = draw.randrange(8 * len(content))
            changed[bit // 8] ^= 1 << bit % 8
            fault = "bit flip"
        else:
            changed = changed[: draw.randrange(len(content))]
            fault = "truncation"
        file.write_bytes(changed)
        try:
            readers[file]()
            tally.add(fault, "not found", f"{file.name}")
        except ValueError as error:
            line = str(error)
            tally.add(fault, "found" if "\n" not in line and len(line) < 600 else "unclear", line)
        file.write_bytes(content)
