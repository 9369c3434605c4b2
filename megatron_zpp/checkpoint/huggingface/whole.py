"""A Hugging Face model as a run of this program has it: its settings, and all of it in memory."""

import torch

from megatron_zpp.checkpoint.huggingface.architecture import fit_vocabulary, read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory, named_directory
from megatron_zpp.checkpoint.huggingface.tokenizer_files import find_tokenizer
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.config.shapes.huggingface import FAMILIES
from megatron_zpp.config.sources.huggingface import HuggingFaceModel
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.tokenizer.build import build_tokenizer


def read_settings(load: str, tokenizer: TokenizerConfig | None) -> HuggingFaceModel:
    """Return what `load`, hf:DIR or hf:ORG/NAME, gives a run beside weights; `tokenizer` is another one.

    Raises ValueError, in one line that names --load, for a model that ours cannot be.
    """
    named = named_directory("--load", load, weights=False)
    architecture = read_architecture(named)
    settings = tokenizer or find_tokenizer(named)
    return HuggingFaceModel(
        load=named.shown,
        model=fit_vocabulary(named, architecture, describe(build_tokenizer(settings))),
        keys={name: key for key, name in FAMILIES[architecture.model_type].keys.items()},
        tokenizer=settings,
        notes=architecture.notes,
    )


def read_whole(named: NamedDirectory) -> tuple[GPT, Tokenizer]:
    """Return the model on the CPU in fp32, and the tokenizer beside it. Raises ValueError in one line."""
    architecture = read_architecture(named)
    tokenizer = build_tokenizer(find_tokenizer(named))
    config = fit_vocabulary(named, architecture, describe(tokenizer))
    with torch.device("meta"):
        model = GPT(config, tokenizer.vocab_size)
    with HuggingFaceWeights(named, config, tokenizer.vocab_size) as weights:
        model.load_state_dict(weights.parameters(), assign=True)
    return model.eval().requires_grad_(False), tokenizer
