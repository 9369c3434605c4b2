"""--load hf:: a Hugging Face model as the initial weights of a run; each rank reads what it owns."""

from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.huggingface.architecture import check_vocabulary, read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import named_directory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import WEIGHTS


def open_weights(directory: str, model: ModelConfig, tokenizer: dict[str, Any]) -> HuggingFaceWeights:
    """Return the weights in `directory`. Raises ValueError that names the flag unless they fit this run."""
    named = named_directory("--load", HUGGINGFACE + directory)
    check_vocabulary(named, read_architecture(named), model, tokenizer)
    return HuggingFaceWeights(named, model, tokenizer["vocab_size"])


def load_weights(directory: str, engine: ZeroEngine, model: ModelConfig, tokenizer: dict[str, Any]) -> None:
    """Put them into the engine. Sends nothing: ranks may fail independently."""
    with open_weights(directory, model, tokenizer) as weights:

        def fill(index: int, elements: range, target: Tensor) -> None:
            layout = engine.units[index].layout
            target.copy_(weights.unit_elements(layout, elements, engine.topology.rank))

        engine.states.fill(WEIGHTS, fill)
