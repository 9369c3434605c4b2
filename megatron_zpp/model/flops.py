"""Counts of parameters and of floating-point operations (PaLM paper, appendix B)."""

from megatron_zpp.config.model import ModelConfig

# Dense peak of one device in TFLOP/s by what the device's name contains: vendors' data sheets, tensor cores.
_PEAK_TFLOPS = (
    ("H200", {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "float32": 51.0}),
    ("H100", {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0}),
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}),
    ("V100", {"float16": 125.0, "float32": 15.7}),
)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Parameters of the GPT, padded vocabulary included."""
    width = config.num_attention_heads * config.kv_channels
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    attention = hidden * 3 * width + 3 * width + width * hidden + hidden
    mlp = 2 * hidden * inner + inner + hidden
    norms = 4 * hidden
    tables = config.padded_vocab_size(vocab_size) * hidden
    tables *= 2 if config.untie_embeddings_and_output_weights else 1
    positions = config.max_position_embeddings * hidden
    return tables + positions + config.num_layers * (attention + mlp + norms) + 2 * hidden


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Forward and backward of one trained token: 6N + 12 · layers · width · sequence length.

    N leaves out tables that are only looked up (positions, and the token embedding when it is untied).
    Attention counts the full square, as PaLM does; recomputation is not counted.
    """
    looked_up = config.max_position_embeddings * config.hidden_size
    if config.untie_embeddings_and_output_weights:
        looked_up += config.padded_vocab_size(vocab_size) * config.hidden_size
    matrix_parameters = parameter_count(config, vocab_size) - looked_up
    width = config.num_attention_heads * config.kv_channels
    return 6.0 * matrix_parameters + 12.0 * config.num_layers * width * config.seq_length


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Data-sheet peak of one device, or None for a device that is not in the table."""
    for part, peaks in _PEAK_TFLOPS:
        if part in device_name:
            return peaks.get(dtype)
    return None
