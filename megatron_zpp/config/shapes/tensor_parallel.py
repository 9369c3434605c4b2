"""Which numbers of tensor ranks can share a model, and of context ranks its samples."""

import math

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.words import counted, divisors

FLAG, CONTEXT_FLAG = "--tensor-model-parallel-size", "--context-parallel-size"
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


def check_context_ranks(model: ModelConfig, ranks: int, tensor_ranks: int, comm_type: str) -> None:
    """Raise ValueError unless `ranks`, each of so many `tensor_ranks`, can share every sample."""
    if ranks == 1:
        return
    chunks = math.lcm(2 * ranks, ranks * tensor_ranks)
    if model.seq_length % chunks:
        shared = f" and {FLAG} {tensor_ranks}" if tensor_ranks > 1 else ""
        fix = f"needs --seq-length in multiples of {chunks}{shared}, not {model.seq_length}"
        raise option_error(CONTEXT_FLAG, ranks, fix)
    if model.attention_dropout:
        fix = f"needs --attention-dropout 0, not {model.attention_dropout}"
        raise option_error(CONTEXT_FLAG, ranks, fix)
    heads = model.num_attention_heads // tensor_ranks
    if comm_type == "a2a" and heads % ranks:
        each = f" / {FLAG} {tensor_ranks}" if tensor_ranks > 1 else ""
        fix = f"must divide --num-attention-heads {model.num_attention_heads}{each} with --cp-comm-type a2a"
        raise option_error(CONTEXT_FLAG, ranks, f"{fix}; use p2p")


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


def listed(numbers: list[int]) -> str:
    """Numbers for an error message."""
    return ", ".join(map(str, numbers)) or "none"
