"""Values that --dry-run assumes, so that a plan needs no tokenizer, no data, and few flags."""

import re

from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.config.model import REQUIRED_SHAPE
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.plan import LINK, NO_LINK
from megatron_zpp.config.shapes.presets import vocabulary_of
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.tokenizer import resolved_type

_NAME = "--dry-run"
_DATA = ("data_path", "train_data_path", "mock_data")
_LENGTH = re.compile("lr_.*_(iters|samples)").fullmatch  # of a part of the learning rate's schedule


def assume(provided: Provided) -> tuple[str, ...]:
    """Fill in what a plan does not depend on, or can assume; return a note on what matters.

    Raises ValueError that names all flags that a plan needs and has not.
    """
    _check_needed(provided)
    if not _has_length(provided):
        interval = provided.get("islands.outer_interval") or IslandsConfig.outer_interval
        islands = provided.get("islands.islands_at") is not None  # whose runs end with an outer step
        provided.fill("training", "train_iters", interval if islands else 1, _NAME)
    provided.fill("learning_rate", "lr", 1e-4, _NAME)
    if not any(provided.get(f"data.{name}") for name in _DATA):
        provided.fill("data", "mock_data", True, _NAME)
    assumed = []
    if provided.get("training.micro_batch_size") is None:
        provided.fill("training", "micro_batch_size", 1, _NAME)
        assumed.append("--micro-batch-size 1")
    if resolved_type(provided.values["tokenizer"]) is None:
        provided.fill("tokenizer", "tokenizer_type", "NullTokenizer", _NAME)
        if provided.get("tokenizer.vocab_size") is None:
            entries = vocabulary_of(provided.get("model.model_preset") or "")
            provided.fill("tokenizer", "vocab_size", entries - 1, _NAME)  # the last id ends documents
            assumed.append(f"a vocabulary of {entries:,}")
    return (f"not given, planned with: {', '.join(assumed)}",) if assumed else ()


def _has_length(provided: Provided) -> bool:
    return bool(provided.get("training.train_iters") or provided.get("training.train_samples"))


def _check_needed(provided: Provided) -> None:
    shape = [name for name in REQUIRED_SHAPE if provided.get(f"model.{name}") is None]
    needed = []
    if shape and provided.get("model.model_preset") is None:
        needed.append(f"--model-preset NAME (or {', '.join(map(flag_name, shape))})")
    if all(provided.get(f"training.{name}_batch_size") is None for name in ("global", "micro")):
        needed.append("--global-batch-size N")
    lengths = [name for name, value in provided.values["learning_rate"].items() if value and _LENGTH(name)]
    if lengths and "lr_decay_iters" not in lengths and not _has_length(provided):
        unit = "samples" if any(name.endswith("samples") for name in lengths) else "iters"
        needed.append(f"--train-{unit} N (or omit {', '.join(map(flag_name, lengths))})")
    if not any(provided.get(f"data.{name}") for name in _DATA):
        orders = ("dataset_packing", "best-fit"), ("dataset_order", "megatron")
        of_documents = [name for name, value in orders if provided.get(f"data.{name}") == value]
        needed += [f"--data-path PATH (or omit {flag_name(name)})" for name in of_documents]
    missing_link = (provided.get("plan.plan_nodes") or 1) > 1 and provided.get("plan.plan_link_gbit") is None
    if missing_link:
        needed.append(LINK)
    if needed:
        link = f"; {LINK}: {NO_LINK}" if missing_link else ""
        raise ValueError(f"--dry-run: give {', '.join(needed)}{link}")
