"""A Hugging Face model as a run has it: its settings, its initial weights, all of it, or a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.huggingface.architecture import (
    check_vocabulary,
    fit_vocabulary,
    read_architecture,
)
from megatron_zpp.checkpoint.huggingface.compare import compare_logits
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory, named_directory
from megatron_zpp.checkpoint.huggingface.tokenizer_files import find_tokenizer, other_ids
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.imported import whole_model, write_imported
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.config.shapes.huggingface import FAMILIES
from megatron_zpp.config.sources.huggingface import HuggingFaceModel
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import WEIGHTS


def read_settings(load: str, tokenizer: TokenizerConfig | None) -> HuggingFaceModel:
    """Return what `load`, hf:DIR or hf:ORG/NAME, gives a run beside weights; `tokenizer` is another one.

    Raises ValueError, in one line that names --load, for a model that ours cannot be.
    """
    named = named_directory("--load", load, weights=False)
    architecture = read_architecture(named)
    settings = tokenizer or find_tokenizer(named)
    built = build_tokenizer(settings)
    return HuggingFaceModel(
        load=named.shown,
        model=fit_vocabulary(named, architecture, describe(built)),
        keys={name: key for key, name in FAMILIES[architecture.model_type].keys.items()},
        tokenizer=settings,
        notes=architecture.notes + (other_ids(named, built) if tokenizer else ()),
    )


def open_weights(directory: str, model: ModelConfig, tokenizer: dict[str, Any]) -> HuggingFaceWeights:
    """Return the weights in `directory`. Raises ValueError that names --load unless they fit this run."""
    named = named_directory("--load", HUGGINGFACE + directory)
    check_vocabulary(named, read_architecture(named), model, tokenizer)
    return HuggingFaceWeights(named, model, tokenizer["vocab_size"])


def load_weights(directory: str, engine: ZeroEngine, model: ModelConfig, tokenizer: dict[str, Any]) -> None:
    """Put them into the engine, each rank what it owns. Sends nothing: ranks may fail independently."""
    with open_weights(directory, model, tokenizer) as weights:

        def fill(index: int, elements: range, target: Tensor) -> None:
            layout = engine.units[index].layout
            target.copy_(weights.unit_elements(layout, elements, engine.topology.rank))

        engine.states.fill(WEIGHTS, fill)


def read_whole(named: NamedDirectory) -> tuple[GPT, Tokenizer]:
    """Return the model on the CPU in fp32, and the tokenizer beside it. Raises ValueError in one line."""
    tokenizer = build_tokenizer(find_tokenizer(named))
    tokenizer.begin = tokenizer.published_begin
    config = fit_vocabulary(named, read_architecture(named), describe(tokenizer))
    with HuggingFaceWeights(named, config, tokenizer.vocab_size) as weights:
        model = whole_model(config, tokenizer.vocab_size, weights.parameters())
    return model.eval().requires_grad_(False), tokenizer


def import_checkpoint(
    named: NamedDirectory, target: Path, flags: TokenizerConfig | None, divisible_by: int
) -> list[str]:
    """Write `target`/iter_0000000, and return lines that say so; `flags` name another tokenizer.

    All weights are held in memory, twice if transformers is installed, for the comparison.
    """
    architecture = read_architecture(named, divisible_by)
    settings = flags or find_tokenizer(named)
    tokenizer = build_tokenizer(settings)
    model = fit_vocabulary(named, architecture, describe(tokenizer))
    with HuggingFaceWeights(named, model, tokenizer.vocab_size) as weights:
        whole = partial(whole_model, model, tokenizer.vocab_size)
        compared = compare_logits(named, named.path, lambda: whole(weights.parameters()))
        written = write_imported(target, model, weights.parameter, settings, tokenizer)
    notes = architecture.notes + (other_ids(named, tokenizer) if flags else ())
    return [*notes, written, compared]
