"""Writes weights of another program as a checkpoint of iteration 0, with the settings of their model."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_name
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import describe_unit, tensor_name
from megatron_zpp.checkpoint.write import write_checkpoint
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.root import Config
from megatron_zpp.config.sources.checkpoint_arguments import MODEL
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.loss_scale import LossScale
from megatron_zpp.zero.model_states import WEIGHTS

_TIMEOUT = timedelta(minutes=1)  # without progress of a file operation
ReadParameter = Callable[[str], Tensor]  # a whole parameter by our name, in fp32


def parameter_shapes(model: ModelConfig, entries: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters by name, for a tokenizer of so many entries."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in GPT(model, entries).named_parameters()}


def whole_model(model: ModelConfig, entries: int, parameters: dict[str, Tensor]) -> GPT:
    """The model with these whole parameters, which it shares."""
    with torch.device("meta"):
        whole = GPT(model, entries)
    whole.load_state_dict(parameters, assign=True)
    return whole


def write_imported(
    target: Path, model: ModelConfig, read: ReadParameter, settings: TokenizerConfig, tokenizer: Tokenizer
) -> str:
    """Write `target`/iter_0000000 and read it back; return a line that says how a run starts from it.

    Raises DamagedFile if it is not what was imported.
    """
    config = Config.from_json(
        {
            "model": asdict(model),
            "tokenizer": asdict(settings),
            "data": {"mock_data": True},  # a run sets this and the rest by its own flags
            "training": {"micro_batch_size": 1, "train_iters": 1},
            "learning_rate": {"lr": 1e-4},
            "precision": {"bf16": model.fp32_residual_connection},  # which needs a 16-bit format
        }
    )
    with torch.device("meta"):
        modules = GPT(config.model, tokenizer.vocab_size).units()
    tensors, units = {}, []
    for index, layout in enumerate(layouts_of(modules, Mesh())):
        tensors[tensor_name(WEIGHTS, index)] = flat = torch.zeros(layout.numel)
        for piece in layout.pieces_in(range(layout.numel)):
            weight = read(piece.placement.name).flatten()
            flat[piece.at.start : piece.at.stop] = weight[piece.elements.start : piece.elements.stop]
        units.append(describe_unit(layout, Mesh()))
    state = {
        "progress": asdict(Progress()),
        "with_optimizer": False,
        "optimizer_steps": 0,
        "loss_scale": LossScale(PrecisionConfig(), torch.device("cpu")).state(),
        "ranks": 1,
        "units": units,
        "kinds": [WEIGHTS],
        "tokenizer": describe(tokenizer),
        "config": config.to_json(),
    }
    path, exchange = target / checkpoint_name(0), Exchange(dist.HashStore(), Topology(), _TIMEOUT, "import")
    write_checkpoint(path, tensors, state, exchange, FileWorker(), beside=tokenizer.files)
    with CheckpointReader(path) as reader:
        for name, weight in reader.parameters().items():
            if not torch.equal(weight.view(torch.int32), read(name).view(torch.int32)):
                raise DamagedFile(f"{path}: {name} is not what was imported")
        reader.check_rest(0, 1)
    return f"{path}: {MODEL} gives a run with --load {target} its model and tokenizer"
