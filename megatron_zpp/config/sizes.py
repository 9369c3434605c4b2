"""The sizes of a transformer: layers, widths, heads, tokens."""

from dataclasses import dataclass

from megatron_zpp.config.options import Options, count, optional, switch
from megatron_zpp.config.shapes.presets import preset_names

WIDEST = 2**20  # more than any model has, so that a typing error is refused before memory is allocated


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Options):
    """The flags with which the section of the model begins."""

    model_preset: str | None = optional(
        "Fill the flags of this section from a published shape; flags that are given override its values. "
        f"One of {preset_names()}, or the path of a Hugging Face config.json."
    )
    # An `int`, `float` or `str` whose default is None is either filled by `check` or required.
    num_layers: int = count(None, "Transformer layers.", at_most=10_000)
    hidden_size: int = count(None, "Width of the residual stream.", at_most=WIDEST)
    num_attention_heads: int = count(None, "Attention heads.", at_most=WIDEST)
    seq_length: int = count(None, "Tokens per sample.", at_most=2**31 - 1)
    max_position_embeddings: int = count(
        None,
        "Longest text of the model in tokens: with learned positions, the rows of their table; default "
        "--seq-length.",
        at_most=2**31 - 1,
    )
    ffn_hidden_size: int = count(
        None,
        "Inner width of the MLP; default 4 × --hidden-size, with --swiglu two thirds of that in multiples of "
        "64.",
        at_most=4 * WIDEST,
    )
    kv_channels: int = count(
        None, "Width of an attention head; default --hidden-size / --num-attention-heads.", at_most=WIDEST
    )
    group_query_attention: bool = switch("Share each head of keys and values among a group of query heads.")
    num_query_groups: int = count(
        None,
        "Heads of keys and values, with --group-query-attention; default 1. Must divide "
        "--num-attention-heads.",
        at_most=WIDEST,
    )

    def check_groups(self) -> None:
        """Fill the number of groups of query heads, and refuse one that does not divide the heads."""
        heads = self.num_attention_heads
        self.fill("num_query_groups", 1 if self.group_query_attention else heads)
        if heads % self.num_query_groups:
            raise self.error("num_query_groups", f"must divide --num-attention-heads {heads}")
        if self.num_query_groups != heads and not self.group_query_attention:
            raise self.error("num_query_groups", "needs --group-query-attention")
