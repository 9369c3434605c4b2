"""Which numbers of tensor ranks can share a model."""

import math

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.words import counted

FLAG = "--tensor-model-parallel-size"
_DIVIDED = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length")


def check_tensor_ranks(model: ModelConfig, ranks: int, *, fp8: bool, node_ranks: int | None = None) -> None:
    """Raise ValueError, with the numbers of ranks that would do, unless `ranks` can share every layer.

    `node_ranks` are the ranks of a node, which `ranks` must divide too; None if they are not known.
    """
    if ranks == 1:
        return
    sizes = {f"{flag_name(name)} {getattr(model, name)}": getattr(model, name) for name in _DIVIDED}
    if fp8:  # a local width is a multiple of 16
        sizes[f"--ffn-hidden-size {model.ffn_hidden_size} / 16 (--fp8)"] = model.ffn_hidden_size // 16
    if node_ranks is not None:
        sizes[f"the {counted(node_ranks, 'rank')} of a node"] = node_ranks
    shared = divisors(math.gcd(*sizes.values()))
    possible = listed([one for one in shared if not fp8 or _keys(model, one) % 16 == 0])
    for name, size in sizes.items():
        if size % ranks:
            raise option_error(FLAG, ranks, f"must divide {name}; possible: {possible}")
    if fp8 and _keys(model, ranks) % 16:
        groups = model.num_query_groups // ranks
        raise option_error(
            FLAG,
            ranks,
            f"leaves {groups} × --kv-channels {model.kv_channels} outputs of keys per rank; must be a "
            f"multiple of 16 with --fp8; possible: {possible}, or --kv-channels in multiples of "
            f"{16 // math.gcd(16, groups)}",
        )


def _keys(model: ModelConfig, ranks: int) -> int:
    """The outputs of keys on each of `ranks`."""
    return model.num_query_groups // ranks * model.kv_channels


def check_vocabulary(model: ModelConfig, vocab_size: int, ranks: int) -> None:
    """Raise ValueError unless `ranks` can share the padded vocabulary, which does not depend on them.

    The numbers that it names are right if `ranks` have passed check_tensor_ranks, as their divisors do too.
    """
    padded, multiple = model.embedding_rows(vocab_size), model.make_vocab_size_divisible_by
    if padded % ranks:
        raise option_error(
            FLAG,
            ranks,
            f"must divide the {padded} rows of the padded vocabulary; use {math.gcd(ranks, padded)}, or a "
            f"--make-vocab-size-divisible-by that is a multiple of {ranks}, such as "
            f"{math.lcm(ranks, multiple)}, not {multiple}",
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def listed(numbers: list[int]) -> str:
    """Numbers for an error message."""
    return ", ".join(map(str, numbers)) or "none"
