"""What 8-bit products need of a run's settings."""

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.config.shapes.tensor_parallel import CONTEXT_FLAG
from megatron_zpp.config.zero import ZeroConfig


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
