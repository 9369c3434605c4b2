"""Compares our model with transformers' own on a directory that both have read."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.model.gpt import GPT

_TOKENS = 1024  # at most, of the text that is compared: logits of 131,072 tokens would not fit in memory
LIMIT = 1e-5  # of a difference between logits in fp32; of the largest logit where that is above 1
_LEFT_OUT = (
    "weights are read back bit for bit; logits are not compared with transformers', which is not installed: "
    "pip install transformers, and run it again to another directory"
)


@torch.inference_mode()
def compare_logits(named: NamedDirectory, directory: Path, ours: Callable[[], GPT]) -> str:
    """Return a line with the largest difference, or that transformers is not installed to compare with.

    `ours` makes the model, in fp32. Raises ValueError if the difference is above the limit.
    """
    if find_spec("transformers") is None:
        return _LEFT_OUT
    import transformers

    model = ours()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {"local_files_only": True, "use_safetensors": True}
    config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    kind = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_pretrained(str(directory), **options)
    length = min(model.config.max_position_embeddings, _TOKENS)
    tokens = torch.randint(
        model.vocab_size, (1, length), generator=torch.Generator().manual_seed(1)
    )  # (B, T)
    expected, found = theirs.float().eval()(tokens).logits, model.eval()(tokens)  # (B, T, V)
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    limit = LIMIT * max(1.0, largest)
    line = f"logits: largest difference from transformers' {difference:.1e}, of logits up to {largest:.1f}"
    if not difference <= limit:  # a NaN is above it
        raise named.error(f"{line}; must be at most {limit:.1e}, so this conversion is wrong")
    return line
