"""Writes weights of another program as a checkpoint of iteration 0, and says the flags that a run needs."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_path
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import describe_state_of, tensor_name
from megatron_zpp.checkpoint.unit_entries import describe_unit
from megatron_zpp.checkpoint.write import SaveOptions, write_checkpoint
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.root import Config
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.placement import Layout, within
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.loss_scale import LossScale
from megatron_zpp.zero.model_states import WEIGHTS

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_SAMPLE = 4096  # tokens, at most, of the --seq-length that is proposed; the longest text may not fit a GPU
_TIMEOUT = timedelta(minutes=1)  # without progress of a file operation
_TOLD_BY_RUN = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
)  # they do not change the weights' use


class Weights(Protocol):
    """The weights of a model by our names."""

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to before `stop` of a parameter, flattened, in fp32."""

    def unit_elements(self, layout: Layout, elements: range) -> Tensor:
        """Return elements of the flat buffer of a unit; its gaps are zero."""


class WholeWeights:
    """Weights that are in memory, whole and in fp32."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._flat = {name: parameter.reshape(-1) for name, parameter in parameters.items()}

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """See Weights."""
        return self._flat[name][start:stop]

    def unit_elements(self, layout: Layout, elements: range) -> Tensor:
        """See Weights."""
        found = torch.zeros(len(elements))
        for piece in layout.pieces_in(elements):
            part = self.elements(piece.placement.name, piece.elements.start, piece.elements.stop)
            found[within(piece.at, elements)] = part
        return found


def write_imported(
    target: Path, model: ModelConfig, weights: Weights, settings: TokenizerConfig, tokenizer: Tokenizer
) -> tuple[Path, str]:
    """Write `target`/iter_0000000 and read it back; return its path, and the flags that a run needs.

    Raises DamagedFile if it is not what was imported.
    """
    config = imported_config(model, settings)
    with torch.device("meta"):
        shapes = GPT(config.model, tokenizer.vocab_size)
    path = _write(target, shapes, weights, config.to_json(), tokenizer)
    _check(path, weights)
    return path, _flags(config.model, config.tokenizer)


def imported_config(model: ModelConfig, tokenizer: TokenizerConfig) -> Config:
    """Return a configuration with model and tokenizer; a run sets the rest by its own flags."""
    return Config.from_json(
        {
            "model": asdict(model),
            "tokenizer": asdict(tokenizer),
            "data": {"mock_data": True},
            "training": {"micro_batch_size": 1, "train_iters": 1},
            "learning_rate": {"lr": 1e-4},
        }
    )


def _write(target: Path, model: GPT, weights: Weights, config: dict[str, Any], tokenizer: Tokenizer) -> Path:
    modules, tensors, units = model.units(), {}, []
    for index, layout in enumerate(layouts_of(modules, Mesh())):
        tensors[tensor_name(WEIGHTS, index)] = weights.unit_elements(layout, range(layout.numel))
        units.append(describe_unit(layout))
    topology, path = Topology(), checkpoint_path(target, 0)
    state = describe_state_of(
        Progress(),
        with_optimizer=False,
        optimizer_steps=0,
        loss_scale=LossScale(PrecisionConfig(), torch.device("cpu")).state(),
        ranks=topology.world_size,
        nodes=topology.nodes,
        units=units,
        kinds=[WEIGHTS],
        config=config,
        tokenizer=describe(tokenizer),
    )
    exchange = Exchange(dist.HashStore(), topology, _TIMEOUT, "import")
    write_checkpoint(path, tensors, state, exchange, SaveOptions(), beside=tokenizer.files())
    return path


def _check(path: Path, weights: Weights) -> None:
    """Raise DamagedFile unless a run would read the weights that were imported."""
    with CheckpointReader(path) as reader:
        for name, weight in reader.parameters().items():
            if not torch.equal(
                weight.flatten().view(torch.int32),
                weights.elements(name, 0, weight.numel()).view(torch.int32),
            ):
                raise DamagedFile(f"{path}: {name} is not what was imported")
        reader.check_rest(0, 1)


def _flags(model: ModelConfig, tokenizer: TokenizerConfig) -> str:
    """The flags that a run needs to start from it."""
    sizes = {name: getattr(model, name) for name in _SIZES}
    implied = asdict(ModelConfig(**sizes, seq_length=model.max_position_embeddings))
    told: dict[str, object] = {flag_name(name): value for name, value in sizes.items()}
    told[flag_name("seq_length")] = min(model.max_position_embeddings, _SAMPLE)
    for name, value in asdict(model).items():
        if value != implied[name] and name not in _TOLD_BY_RUN:
            if not model.__dataclass_fields__[name].metadata["typed"]:
                return "--use-checkpoint-args"  # a field without a flag
            told[flag_name(name)] = "" if value is True else value
    for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
        if getattr(tokenizer, name) is not None:
            told[flag_name(name)] = getattr(tokenizer, name)
    return " ".join(f"{flag} {value}".rstrip() for flag, value in told.items())
