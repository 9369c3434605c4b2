"""What a layer consists of, as sizes: its modules, counts of FLOPs and parameters, and plans read this."""

from dataclasses import dataclass
from functools import cache

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class LinearShape:
    """A linear map, or several side by side: `runs` are the outputs of each, which tensor ranks divide."""

    inputs: int
    runs: tuple[int, ...]
    biased: bool

    @property
    def outputs(self) -> int:
        """The outputs of all runs."""
        return sum(self.runs)

    @property
    def weights(self) -> int:
        """Parameters, without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class LayerShape:
    """The linear maps of a layer, and the widths of its norms.

    `norms` are those of hidden states; `head_norms` (number, width) those of queries and of keys. `sinks` are
    weights of the softmax, one per head.
    """

    qkv: LinearShape
    output: LinearShape
    mlp_input: LinearShape
    mlp_output: LinearShape
    norms: tuple[int, ...]
    head_norms: tuple[tuple[int, int], ...]
    sinks: int = 0

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """All linear maps."""
        return self.qkv, self.output, self.mlp_input, self.mlp_output


@cache
def layer_shape(config: ModelConfig) -> LayerShape:
    """That of each layer of a model."""
    hidden, inner, biased = config.hidden_size, config.ffn_hidden_size, not config.disable_bias_linear
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    queries, keys = heads * width, groups * width
    head_norms: tuple[tuple[int, int], ...] = ()
    if config.qk_layernorm:
        head_norms = (heads, width), (groups, width)
        if config.qk_layernorm_across_heads:
            head_norms = (1, queries), (1, keys)
    return LayerShape(
        qkv=LinearShape(hidden, (queries, keys, keys), biased or config.add_qkv_bias),
        output=LinearShape(queries, (hidden,), biased),
        mlp_input=LinearShape(hidden, (inner,) * (2 if config.gated else 1), biased),
        mlp_output=LinearShape(inner, (hidden,), biased),
        norms=(hidden,) * (4 if config.norm_placement == "both" else 2),
        head_norms=head_norms,
        sinks=heads if config.softmax_type == "learnable" else 0,
    )


def trained_matrices(config: ModelConfig, optimizer: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """What Muon trains: the weights of layers' linear maps by name, and the rows of each matrix in them."""
    if optimizer.optimizer != "muon":
        return {}
    shape, split_qkv = layer_shape(config), not optimizer.muon_no_split_qkv
    rows = {
        "attention.qkv": shape.qkv.runs if split_qkv else (shape.qkv.outputs,),
        "attention.output": (shape.output.outputs,),
        "mlp.input": (shape.mlp_input.outputs,),
        "mlp.output": (shape.mlp_output.outputs,),
    }
    layers = range(config.num_layers)
    return {f"layers.{layer}.{name}.weight": runs for layer in layers for name, runs in rows.items()}
