"""How the model knows positions: learned, rotary embedding and its scalings, or not at all."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import option
from megatron_zpp.config.sizes import SizeConfig
from megatron_zpp.config.values.attention_window import parse_pattern

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
OF_ROPE = ("rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor")
_ROPE = "--position-embedding-type rope"


@dataclass(frozen=True, kw_only=True)
class PositionConfig(SizeConfig):
    """The flags of positions, which are among those of the model."""

    position_embedding_type: PositionEmbedding = option(
        None,
        "How the model knows positions: a learned table, rotary embedding of queries and keys, scores that "
        "fall with distance (ALiBi), or not at all; default learned_absolute.",
    )
    rotary_base: float | None = option(
        None, "Base of rope's wavelengths; default 10000.", needs=_ROPE, above=1, at_most=1e12
    )
    rotary_percent: float | None = option(
        None, "Share of each head that rope rotates; default 1.", needs=_ROPE, above=0, at_most=1
    )
    rotary_base_local: float | None = option(
        None,
        "Base of rope's wavelengths in layers with a window (Gemma 3); default --rotary-base.",
        needs=f"{_ROPE} and --window-size",
        above=1,
        at_most=1e12,
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None,
        "Divide rope's positions by this, in layers without a window if --rotary-base-local is given.",
        needs=_ROPE,
        at_least=1,
        at_most=1e6,
    )
    no_rope_freq: str | None = option(
        None,
        "Layers without rope: each N-th one, or a Python list with a 1 (without) or 0 (with rope) per layer, "
        'such as "([0]*3+[1])*8" (SmolLM3). Default: all layers have it.',
        needs=_ROPE,
    )
    use_rope_scaling: bool = option(False, "Stretch rope's long wavelengths as Llama 3.1 does.", needs=_ROPE)
    rope_scaling_factor: float | None = option(
        None,
        "Factor of the longest wavelengths; default 8.",
        needs="--use-rope-scaling",
        at_least=1,
        at_most=1e6,
    )

    @property
    def layers_with_rope(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        if self.position_embedding_type != "rope" or self.no_rope_freq is None:
            return (self.position_embedding_type == "rope",) * self.num_layers
        return _layers_with_rope(self.no_rope_freq, self.num_layers)

    @property
    def rotated_channels(self) -> int:
        """Channels of each head that rope rotates; 0 for other position embeddings."""
        return int(self.kv_channels * self.rotary_percent) if self.rotary_percent else 0

    def check_positions(self) -> None:
        """Fill what follows from other flags, and refuse what cannot be."""
        rope = self.position_embedding_type == "rope"
        if rope:
            self._fill("rotary_base", 10_000.0)
            self._fill("rotary_percent", 1.0)
        if self.use_rope_scaling:
            self._fill("rope_scaling_factor", 8.0)
            if self.rotary_seq_len_interpolation_factor is not None:
                fix = "contradicts --use-rope-scaling; give one"
                raise self.error("rotary_seq_len_interpolation_factor", fix)
        if self.no_rope_freq is not None:
            _layers_with_rope(self.no_rope_freq, self.num_layers)
        if rope and (self.rotated_channels == 0 or self.rotated_channels % 2):
            raise self.error(
                "rotary_percent",
                f"rotates {self.rotated_channels} of --kv-channels {self.kv_channels}; must be even",
            )
        if self.seq_length > self.max_position_embeddings:
            raise self.error(
                "seq_length",
                f"must be at most --max-position-embeddings {self.max_position_embeddings}",
            )


def _layers_with_rope(pattern: str, layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope, by --no-rope-freq."""
    found = parse_pattern(pattern, layers, "--no-rope-freq", ("without rope", "with rope"))
    return found if pattern.strip().isdecimal() else tuple(not each for each in found)
