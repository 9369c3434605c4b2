"""Which numbers of tensor ranks can share a model."""

import math

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error

FLAG = "--tensor-model-parallel-size"
_DIVIDED = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length")


def check_overlap(ranks: int, *, fp8: bool) -> None:
    """Raise ValueError, with what would do, unless products of `ranks` can run beside their exchanges."""
    flag = "--tp-comm-overlap"
    if ranks == 1:
        raise option_error(flag, "(given)", f"needs {FLAG} 2 or more: one rank exchanges no activations")
    if fp8:
        fix = "needs 16-bit products: those of --fp8 take the tokens of all ranks at once; omit one of them"
        raise option_error(flag, "(given)", fix)


def check_tensor_ranks(model: ModelConfig, ranks: int, *, fp8: bool) -> None:
    """Raise ValueError, with the sizes that would do, unless `ranks` can share every layer of the model."""
    sizes = {name: getattr(model, name) for name in _DIVIDED}
    if fp8:  # a local width is a multiple of 16
        sizes["ffn_hidden_size"] = model.ffn_hidden_size // 16
    for name, size in sizes.items():
        if size % ranks:
            unit = " / 16 (--fp8)" if fp8 and name == "ffn_hidden_size" else ""
            raise option_error(
                FLAG,
                ranks,
                f"must divide {flag_name(name)} {getattr(model, name)}{unit}; possible: "
                f"{divisors(math.gcd(*sizes.values()))}",
            )
    if fp8 and model.num_query_groups // ranks * model.kv_channels % 16:
        raise option_error(
            FLAG,
            ranks,
            f"leaves {model.num_query_groups // ranks} × --kv-channels {model.kv_channels} outputs of keys "
            "per rank; must be a multiple of 16 with --fp8",
        )


def check_vocabulary(model: ModelConfig, vocab_size: int, ranks: int) -> None:
    """Raise ValueError unless `ranks` can share the padded vocabulary, which does not depend on them."""
    padded = model.embedding_rows(vocab_size)
    if padded % ranks:
        raise option_error(
            FLAG,
            ranks,
            f"must divide the {padded} rows of the padded vocabulary; choose another "
            f"--make-vocab-size-divisible-by, now {model.make_vocab_size_divisible_by}",
        )


def divisors(number: int) -> str:
    """The divisors of a number, for an error message."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
