"""Counts of parameters and of floating-point operations (PaLM paper, appendix B)."""

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.shape import layer_shape

# Dense peak of one device in TFLOP/s by what the device's name contains: vendors' data sheets, tensor cores.
_PEAK_TFLOPS = (
    ("H200", {"float8": 1979.0, "bfloat16": 989.0, "float16": 989.0, "float32": 67.0}),
    ("H100 PCIe", {"float8": 1513.0, "bfloat16": 756.0, "float16": 756.0, "float32": 51.0}),
    ("H100", {"float8": 1979.0, "bfloat16": 989.0, "float16": 989.0, "float32": 67.0}),
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}),
    ("V100", {"float16": 125.0, "float32": 15.7}),
)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the GPT, padded vocabulary included."""
    hidden, shape = config.hidden_size, layer_shape(config)
    norm = 2 if config.normalization == "LayerNorm" else 1  # vectors: gains, and a LayerNorm's biases
    biases = sum(each.outputs for each in shape.linears if each.biased)
    norms = norm * (sum(shape.norms) + sum(width for _, width in shape.head_norms))
    tables = config.embedding_rows(vocab_size) * hidden
    tables *= 2 if config.untie_embeddings_and_output_weights else 1
    layers = config.num_layers * (layer_matrices(config) + biases + norms + shape.sinks)
    ends = norm * hidden * (2 if config.embed_layernorm else 1)
    return tables + _position_parameters(config) + layers + ends


def layer_matrices(config: ModelConfig) -> int:
    """Return the number of parameters of one layer's matrices."""
    return sum(each.weights for each in layer_shape(config).linears)


def _position_parameters(config: ModelConfig) -> int:
    learned = config.position_embedding_type == "learned_absolute"
    return config.max_position_embeddings * config.hidden_size if learned else 0


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Return FLOPs of forward and backward of one token: 6N + 12 · layers · width · sequence length.

    N leaves out tables that are only looked up (positions, and the token embedding when it is untied).
    Attention counts the full square, as PaLM does, or of layers with a window the window's tokens;
    recomputation is not counted.
    """
    looked_up = _position_parameters(config)
    if config.untie_embeddings_and_output_weights:
        looked_up += config.embedding_rows(vocab_size) * config.hidden_size
    matrix_parameters = parameter_count(config, vocab_size) - looked_up
    width = layer_shape(config).output.inputs
    return 6.0 * matrix_parameters + 12.0 * width * attended_tokens(config)


def attended_tokens(config: ModelConfig) -> int:
    """Return the sum over layers of the tokens that a token's scores are counted for."""
    return sum(min(window or config.seq_length, config.seq_length) for window in config.layer_windows)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the data-sheet peak of one device, or None for a device that is not in the table.

    `dtype` is torch's name of a format, or float8 for both formats of 8-bit products.
    """
    for part, peaks in _PEAK_TFLOPS:
        if part in device_name:
            return peaks.get(dtype)
    return None
