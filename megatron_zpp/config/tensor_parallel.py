"""Which numbers of tensor ranks can share a model, and how they share the tokens of a micro-batch."""

import math
from dataclasses import dataclass
from itertools import count

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name, option_error

FLAG = "--tensor-model-parallel-size"
_DIVIDED = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length")


@dataclass(frozen=True)
class TokenPieces:
    """In how many equal pieces tensor ranks share tokens laid end to end: a rank has its T-th of each piece.

    There are at most `most` pieces; 1: each rank has a contiguous run of the tokens. A piece has at least
    `least` tokens: a product of 1,024 tokens and 4,096 outputs has 128 tiles of 128 × 256, which occupy the
    132 multiprocessors of a GPU once, and products of fewer tokens leave some of these idle.
    """

    most: int = 1
    least: int = 1024

    def of(self, tokens: int, ranks: int) -> int:
        """Return the largest possible number of pieces; 1 always is."""
        for pieces in range(self.most, 1, -1):
            if tokens % (pieces * ranks) == 0 and tokens // pieces >= self.least:
                return pieces
        return 1


OVERLAPPED = TokenPieces(most=4)  # about a quarter of an exchange has nothing to run beside


def check_overlap(model: ModelConfig, micro_batch_size: int, ranks: int, *, fp8: bool) -> None:
    """Raise ValueError, with what would do, unless `ranks` can share a micro-batch in several pieces."""
    flag = "--tp-comm-overlap"
    if ranks == 1:
        raise option_error(flag, "(given)", f"needs {FLAG} 2 or more: one rank exchanges no activations")
    if fp8:
        fix = "needs 16-bit products: those of --fp8 take the tokens of all ranks at once; omit one of them"
        raise option_error(flag, "(given)", fix)
    if OVERLAPPED.of(micro_batch_size * model.seq_length, ranks) == 1:
        tokens = micro_batch_size * model.seq_length
        enough = next(
            size for size in count(micro_batch_size) if OVERLAPPED.of(size * model.seq_length, ranks) > 1
        )
        raise option_error(
            flag,
            "(given)",
            f"cuts the {tokens} tokens of a micro-batch into 2 to {OVERLAPPED.most} equal pieces, each of at "
            f"least {OVERLAPPED.least} and a multiple of {FLAG} {ranks}; "
            f"possible: --micro-batch-size {enough}",
        )


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
    padded = model.padded_vocab_size(vocab_size)
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
