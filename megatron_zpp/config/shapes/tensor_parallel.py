"""What tensor ranks, context ranks and 8-bit products need of the sizes of a model and its batches."""

import math

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.config.words import counted, divisors
from megatron_zpp.config.zero import ZeroConfig

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


def check_fp8(
    model: ModelConfig,
    training: TrainingConfig,
    precision: PrecisionConfig,
    zero: ZeroConfig,
    context_ranks: int,
) -> None:
    """Raise ValueError for settings that contradict --fp8.

    Every dimension of an 8-bit product is a multiple of 16, also the tokens that weight gradients sum over.
    """
    heads = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    tokens = training.micro_batch_size * model.seq_length // context_ranks
    shared = f" / {CONTEXT_FLAG} {context_ranks}" if context_ranks > 1 else ""
    for flag, value, width in (
        ("--hidden-size", model.hidden_size, model.hidden_size),
        ("--ffn-hidden-size", model.ffn_hidden_size, model.ffn_hidden_size),
        ("--kv-channels", f"{model.kv_channels} × --num-attention-heads {model.num_attention_heads}", heads),
        ("--kv-channels", f"{model.kv_channels} × --num-query-groups {model.num_query_groups}", keys),
        (
            "--micro-batch-size",
            f"{training.micro_batch_size} × --seq-length {model.seq_length}{shared}",
            tokens,
        ),
    ):
        if width % 16:
            raise option_error(flag, value, f"is {width}; must be a multiple of 16 with --fp8")
    if precision.fp8_param_gather and zero.zero_quantized_weights and not zero.sends_differences:
        other = f"--zero-quantized-weights in {zero.zero_quantized_weights_format}"
        fix = (
            f"gathers the 8-bit codes that are multiplied, and {other} would gather other codes; use "
            "--zero-quantized-weights-format delta4, or omit --zero-quantized-weights to gather a "
            "byte per weight, or omit --fp8-param-gather"
        )
        raise precision.error("fp8_param_gather", fix)


def _keys(model: ModelConfig, ranks: int) -> int:
    """The outputs of keys on each of `ranks`."""
    return model.num_query_groups // ranks * model.kv_channels


def check_vocabulary(model: ModelConfig, precision: PrecisionConfig, vocab_size: int, ranks: int) -> None:
    """Raise ValueError unless `ranks` can share the padded vocabulary, which does not depend on them.

    8-bit products need parts that are multiples of 16 entries.
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
    if precision.fp8_output_layer and padded % (16 * ranks):
        needed = f"needs a multiple of {16 * ranks} entries in the padded vocabulary, not {padded}"
        raise precision.error("fp8_output_layer", f"{needed}; choose another --make-vocab-size-divisible-by")


def listed(numbers: list[int]) -> str:
    """Numbers for an error message."""
    return ", ".join(map(str, numbers)) or "none"
