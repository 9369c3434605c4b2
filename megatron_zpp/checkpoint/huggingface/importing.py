"""Makes a checkpoint of iteration 0 from a directory of Hugging Face's."""

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.directory import checkpoint_path
from megatron_zpp.checkpoint.huggingface.architecture import Architecture, check_vocabulary, read_architecture
from megatron_zpp.checkpoint.huggingface.compare import LEFT_OUT, compare_logits, have_transformers
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory, check_empty
from megatron_zpp.checkpoint.huggingface.tokenizer_files import find_tokenizer
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import Progress, describe_state_of, describe_unit, tensor_name
from megatron_zpp.checkpoint.write import SaveOptions, write_checkpoint
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.root import Config
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.zero.build import in_order, layouts_of
from megatron_zpp.zero.engine import WEIGHTS
from megatron_zpp.zero.flat_layout import SHARD_MULTIPLE
from megatron_zpp.zero.loss_scale import LossScale

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_TOLD_BY_RUN = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
)  # they do not change the weights' use


def import_checkpoint(
    named: NamedDirectory, target: Path, flags: TokenizerConfig | None, divisible_by: int
) -> list[str]:
    """Write `target`/iter_0000000, and return lines that say so; `flags` name another tokenizer.

    All weights are held in memory, twice if transformers is installed, for the comparison.
    """
    architecture = read_architecture(named, divisible_by)
    settings = flags or find_tokenizer(named)
    tokenizer = build_tokenizer(settings)
    check_vocabulary(named, architecture, describe(tokenizer))
    check_empty("CHECKPOINT_DIR", target)
    with HuggingFaceWeights(named, architecture.model, architecture.vocab_size) as weights:
        with torch.device("meta"):
            model = GPT(architecture.model, architecture.vocab_size)
        compared = LEFT_OUT
        if have_transformers():
            whole = GPT(architecture.model, architecture.vocab_size)
            whole.load_state_dict(weights.parameters(), assign=True)
            compared = compare_logits(named, named.path, whole)
            del whole
        config = _config(architecture, settings)
        path = _write(target, model, weights, config.to_json(), tokenizer)
        _check(path, weights)
    return [*architecture.notes, f"{path}: {_flags(config.model, config.tokenizer)}", compared]


def _config(architecture: Architecture, tokenizer: TokenizerConfig) -> Config:
    """Return a configuration with model and tokenizer; a run sets the rest by its own flags."""
    return Config.from_json(
        {
            "model": asdict(architecture.model),
            "tokenizer": asdict(tokenizer),
            "data": {"mock_data": True},
            "training": {"micro_batch_size": 1, "train_iters": 1},
            "learning_rate": {"lr": 1e-4},
        }
    )


def _write(
    target: Path, model: GPT, weights: HuggingFaceWeights, config: dict[str, Any], tokenizer: Tokenizer
) -> Path:
    modules, tensors, units = model.units(), {}, []
    for index, ((name, module), layout) in enumerate(
        zip(modules, layouts_of(modules, 1, SHARD_MULTIPLE), strict=True)
    ):
        parameters = {f"{name}.{path}": parameter for path, parameter in in_order(module)}
        flat = weights.unit_elements(tuple(parameters), layout, layout.shard(0))
        tensors[tensor_name(WEIGHTS, index)] = flat
        units.append(describe_unit(parameters, layout))
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
    exchange = Exchange(dist.HashStore(), topology, timedelta(minutes=1), "import")
    options = SaveOptions(read_back=True)
    write_checkpoint(path, tensors, state, exchange, options, beside=tokenizer.files())
    return path


def _check(path: Path, weights: HuggingFaceWeights) -> None:
    """Raise DamagedFile unless a run would read the weights of the directory."""
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
    for name, value in asdict(model).items():
        if value != implied[name] and name not in _TOLD_BY_RUN:
            told[flag_name(name)] = "" if value is True else value
    for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
        if getattr(tokenizer, name) is not None:
            told[flag_name(name)] = getattr(tokenizer, name)
    return " ".join(f"{flag} {value}".rstrip() for flag, value in told.items())
