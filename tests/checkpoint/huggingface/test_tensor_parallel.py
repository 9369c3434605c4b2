"""Export of a checkpoint of several tensor ranks, and --load hf: into several tensor ranks."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_zpp.checkpoint.huggingface.importing import load_weights
from megatron_zpp.checkpoint.huggingface.names import TOKENS
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.generate.loading import load_model
from tests.checkpoint.saving import TOKENIZER, save, small
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks

ENTRIES = 50  # without rows that pad the vocabulary
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 8 --micro-batch-size 2 --train-iters 1 --lr 1 --eval-iters 0"
)
SMALL = parse_args(FLAGS.split())


def save_shared(topology: Topology, directory: str) -> None:
    engine = small(topology=topology, tensor=2, zero_stage=3)
    save(Path(directory) / "run", engine, config=SMALL.to_json())
    weights = weights_of(engine)
    if topology.rank == 0:
        save_file(weights, Path(directory) / "weights.safetensors")


def start_shared(topology: Topology, directory: str, tensor: int) -> None:
    engine = small(seed=9, topology=topology, tensor=tensor, zero_stage=3)
    load_weights(str(Path(directory) / "out"), engine, SMALL.model, TOKENIZER)
    weights = weights_of(engine)
    if topology.rank == 0:
        save_file(weights, Path(directory) / f"started_{tensor}.safetensors")


def test_shares_go_to_hugging_face_and_back(tool: Callable[..., str], tmp_path: Path) -> None:
    on_ranks(4, save_shared, str(tmp_path))
    saved = load_file(tmp_path / "weights.safetensors")
    model, _ = load_model(str(tmp_path / "run"), None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    tool("export", tmp_path / "run", tmp_path / "out")
    for tensor in (2, 4):
        on_ranks(4, start_shared, str(tmp_path), tensor)
        started = load_file(tmp_path / f"started_{tensor}.safetensors")
        assert started.keys() == saved.keys()
        for name, weight in started.items():
            rows = ENTRIES if name == TOKENS else len(weight)
            assert torch.equal(weight[:rows], saved[name][:rows]), name
