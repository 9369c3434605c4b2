"""How the model knows positions: learned, rotary embedding and its scalings, or not at all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import option, optional, switch
from megatron_zpp.config.sizes import SizeConfig
from megatron_zpp.config.values.attention_window import describe_pattern, parse_pattern

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "longrope", "alibi", "none"]
ROTARY = ("rope", "yarn", "longrope")
OF_ROTARY = (  # of all three
    *("rotary_base", "rotary_base_local", "rotary_percent", "rotary_interleaved", "no_rope_freq"),
)
OF_ONE_ROTARY = (  # of one of them alone
    *("rotary_seq_len_interpolation_factor", "rotary_ntk_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
    *("longrope_short_factor", "longrope_long_factor"),
)
_TYPE = "--position-embedding-type"
_ROTARY, _ROPE, _YARN, _LONGROPE = (
    f"{_TYPE} {kinds}" for kinds in ("rope, yarn or longrope", "rope", "yarn", "longrope")
)
_STRETCHED = f"{_TYPE} yarn or longrope"


@dataclass(frozen=True, kw_only=True)
class PositionConfig(SizeConfig):
    """The flags of positions, which are among those of the model."""

    position_embedding_type: PositionEmbedding = option(
        None,
        "How the model knows positions: a learned table; rotary embedding of queries and keys, as it is "
        "(rope) or stretched to longer texts by YaRN or LongRoPE; scores that fall with distance (ALiBi); or "
        "not at all. Default learned_absolute.",
        implied="learned_absolute",
    )
    rotary_base: float | None = optional(
        "Base of rope's wavelengths; default 10000.", needs=_ROTARY, implied=10_000.0, above=1, at_most=1e12
    )
    rotary_percent: float | None = optional(
        "Share of each head that rope rotates; default 1.", needs=_ROTARY, implied=1.0, above=0, at_most=1
    )
    rotary_base_local: float | None = optional(
        "Base of rope's wavelengths in layers with a window, which are then not scaled (Gemma 3, OLMo 3); "
        "default --rotary-base.",
        needs=f"{_ROTARY} and --window-size",
        above=1,
        at_most=1e12,
    )
    rotary_interleaved: bool = switch(
        "Rotate neighbouring channels as pairs, not those of two halves (GLM-4).", needs=_ROTARY
    )
    rotary_seq_len_interpolation_factor: float | None = optional(
        "Divide rope's positions by this, in layers without a window if --rotary-base-local is given.",
        needs=_ROPE,
        at_least=1,
        at_most=1e6,
    )
    no_rope_freq: str | None = optional(
        "Layers without rope: each N-th one, or a Python list with a 1 (without) or 0 (with rope) per layer, "
        'such as "([0]*3+[1])*8" (SmolLM3). Default: all layers have it.',
        needs=_ROTARY,
    )
    use_rope_scaling: bool = switch("Stretch rope's long wavelengths as Llama 3.1 does.", needs=_ROPE)
    rope_scaling_factor: float | None = optional(
        "Factor of the longest wavelengths; default 8.",
        needs="--use-rope-scaling",
        implied=8.0,
        at_least=1,
        at_most=1e6,
    )
    rotary_ntk_factor: float | None = optional(
        "Multiply --rotary-base so that the longest wavelength gets this factor, and the shortest none "
        "(NTK-aware scaling).",
        needs=_ROPE,
        at_least=1,
        at_most=1e6,
    )
    yarn_original_max_position_embeddings: int | None = optional(
        "Tokens of the longest text before YaRN or LongRoPE stretched positions.",
        needs=_STRETCHED,
        at_least=2,
        at_most=2**31 - 1,
    )
    rotary_scaling_factor: float | None = optional(
        "Factor by which YaRN or LongRoPE stretch texts; default --max-position-embeddings / "
        "--yarn-original-max-position-embeddings. LongRoPE only scales rotated channels by it.",
        needs=_STRETCHED,
        at_least=1,
        at_most=1e6,
    )
    yarn_beta_fast: float | None = optional(
        "YaRN leaves channels unchanged that turn at least so often in a text of the original length; "
        "default 32.",
        needs=_YARN,
        implied=32.0,
        above=0,
        typed=False,
    )
    yarn_beta_slow: float | None = optional(
        "YaRN stretches channels by the whole factor that turn at most so often in it; default 1.",
        needs=_YARN,
        implied=1.0,
        above=0,
        typed=False,
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "Whether the bounds between which YaRN interpolates are rounded to whole channels.",
        needs=_YARN,
        typed=False,
    )
    mscale: float | None = optional(
        "YaRN multiplies rotated channels by (1 + mscale · ln(factor) / 10) / (1 + mscale_all_dim · "
        "ln(factor) / 10); default 1.",
        needs=_YARN,
        implied=1.0,
        typed=False,
    )
    mscale_all_dim: float | None = optional("See mscale; default 0.", needs=_YARN, implied=0.0, typed=False)
    longrope_short_factor: tuple[float, ...] | None = optional(
        "Factor of the wavelength of each pair of channels in texts up to the original length (Phi-3).",
        needs=_LONGROPE,
        above=0,
        typed=False,
    )
    longrope_long_factor: tuple[float, ...] | None = optional(
        "The same in longer texts.", needs=_LONGROPE, above=0, typed=False
    )

    @property
    def rotary(self) -> bool:
        """Whether positions are rotations of queries and keys."""
        return self.position_embedding_type in ROTARY

    @property
    def longrope_limit(self) -> int | None:
        """The tokens beyond which LongRoPE has other factors for all of a text; None without it."""
        long = self.position_embedding_type == "longrope"
        return self.yarn_original_max_position_embeddings if long else None

    @property
    def scaled_rotary_base(self) -> float:
        """--rotary-base with --rotary-ntk-factor."""
        assert self.rotary_base is not None, "`check_positions` fills it"
        return ntk_base(self.rotary_base, self.rotary_ntk_factor, self.rotated_channels)

    @property
    def rotary_attention_factor(self) -> float:
        """The factor of rotated channels (YaRN paper, 2309.00071, 3.4; LongRoPE paper, 2402.13753)."""
        factor, original = self.rotary_scaling_factor, self.yarn_original_max_position_embeddings
        if self.position_embedding_type == "longrope":
            assert factor is not None
            assert original is not None
            return math.sqrt(1 + math.log(factor) / math.log(original))
        if self.position_embedding_type != "yarn":
            return 1.0
        assert factor is not None
        assert self.mscale is not None
        assert self.mscale_all_dim is not None
        logarithm = 0.1 * math.log(factor)
        return (1 + self.mscale * logarithm) / (1 + self.mscale_all_dim * logarithm)

    @property
    def layers_with_rope(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        if not self.rotary or self.no_rope_freq is None:
            return (self.rotary,) * self.num_layers
        return rope_layers(self.no_rope_freq, self.num_layers)

    @property
    def rotated_channels(self) -> int:
        """Channels of each head that rope rotates; 0 for other position embeddings."""
        return int(self.kv_channels * self.rotary_percent) if self.rotary_percent else 0

    def check_positions(self) -> None:
        """Fill what follows from other flags, and refuse what cannot be."""
        channels = self.rotated_channels
        if self.rotary and (channels == 0 or channels % 2):
            fix = f"rotates {channels} of --kv-channels {self.kv_channels}; must be even"
            raise self.error("rotary_percent", fix)
        if self.no_rope_freq is not None:
            rotated = rope_layers(self.no_rope_freq, self.num_layers)
            object.__setattr__(self, "no_rope_freq", describe_rope_layers(rotated))  # equal ones are equal
        self.check_alternatives(
            "rotary_ntk_factor", "use_rope_scaling", "rotary_seq_len_interpolation_factor"
        )
        if self.rotary_ntk_factor is not None and channels == 2:
            raise self.error("rotary_ntk_factor", "needs more than 2 rotated channels")
        if self.position_embedding_type in ("yarn", "longrope"):
            self._check_stretched()
        if self.seq_length > self.max_position_embeddings:
            raise self.error(
                "seq_length",
                f"must be at most --max-position-embeddings {self.max_position_embeddings}",
            )

    def _check_stretched(self) -> None:
        original = self.yarn_original_max_position_embeddings
        if original is None:
            fix = f"{_TYPE} {self.position_embedding_type} needs the length of text before it"
            raise self.error("yarn_original_max_position_embeddings", fix)
        self.fill("rotary_scaling_factor", max(1.0, self.max_position_embeddings / original))
        if self.position_embedding_type == "longrope":
            for name in ("longrope_short_factor", "longrope_long_factor"):
                pairs = self.rotated_channels // 2
                if len(getattr(self, name) or ()) != pairs:
                    raise self.error(name, f"must be {pairs} numbers, one per pair of rotated channels")
            return
        if (self.yarn_beta_fast or 0.0) < (self.yarn_beta_slow or 0.0):
            raise self.error("yarn_beta_fast", f"must be at least yarn_beta_slow {self.yarn_beta_slow}")
        if self.rotary_attention_factor <= 0:
            raise self.error("mscale", "gives rotated channels a factor that is not above 0")


def ntk_base(base: float, factor: float | None, rotated: int) -> float:
    """Return the base that multiplies the longest wavelength of `rotated` channels by `factor`."""
    return base if factor is None else base * factor ** (rotated / (rotated - 2))


def rope_layers(pattern: str, layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope, by --no-rope-freq."""
    found = parse_pattern(pattern, layers, "--no-rope-freq", ("without rope", "with rope"))
    return found if pattern.strip().isdecimal() else tuple(not each for each in found)


def describe_rope_layers(rotated: Sequence[bool]) -> str | None:
    """Return the shortest value of --no-rope-freq for layers; None if all have rope."""
    number = describe_pattern(rotated)
    if number is None or number.isdecimal():
        return number
    return str([int(not each) for each in rotated])
