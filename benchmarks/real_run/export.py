"""Writes what the baseline needs to equal a run of pretrain_gpt.py: its first weights, and its batches.

python -m benchmarks.real_run.export --output DIR -- FLAGS of pretrain_gpt.py

DIR gets initial.safetensors, train.bin and held_out.bin (rows of T + 1 uint16 tokens, in the order in which
the run reads them, and those of each of its evaluations) and shapes.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.common import program_parser
from benchmarks.contest.protocol import plain_model
from megatron_zpp.config.root import parse_args
from megatron_zpp.data.samples import Samples
from megatron_zpp.mesh import Mesh
from megatron_zpp.train.inputs import check_inputs

ROWS = 1024  # read at a time


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("flags", nargs="+", help="of pretrain_gpt.py, behind --")
    options = parser.parse_args()
    config = parse_args(options.flags)
    inputs = check_inputs(config, Mesh(), print)
    options.output.mkdir(parents=True, exist_ok=True)
    evaluated = inputs.schedule.evaluated_samples(config.evaluation)
    assert inputs.splits.train is not None
    assert inputs.splits.valid is not None
    assert evaluated is not None
    write_rows(inputs.splits.train, inputs.schedule.samples, options.output / "train.bin")
    write_rows(inputs.splits.valid, evaluated, options.output / "held_out.bin")
    vocabulary = inputs.tokenizer["vocab_size"]
    device = "cuda" if torch.cuda.is_available() and config.distributed.device != "cpu" else "cpu"
    try:
        plain = plain_model(config.model, vocabulary, torch.device(device), config.training.seed)
    except ValueError as error:
        sys.exit(f"export.py: {error}")
    save_file(plain.state_dict(), options.output / "initial.safetensors")
    shapes = {"seq_length": config.model.seq_length, "vocabulary": vocabulary}
    (options.output / "shapes.json").write_text(json.dumps(shapes))


def write_rows(samples: Samples, count: int, path: Path) -> None:
    """Write the first `count` samples as uint16."""
    with path.open("wb") as file:
        for first in range(0, count, ROWS):
            batch = samples.batch(np.arange(first, min(first + ROWS, count)))
            file.write(batch.astype(np.uint16).tobytes())


if __name__ == "__main__":
    main()
