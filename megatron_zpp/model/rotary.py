"""Rotary position embedding (RoFormer paper, 3.4.2), and how it is stretched to longer texts.

Shapes: B batch, T tokens, N heads (of queries, or groups of keys), H head width, R rotated channels, R <= H.

Channels i and i + R/2 of a head form a pair, as in Megatron-LM and Hugging Face, or 2i and 2i + 1
(--rotary-interleaved); the angle of pair i is position · base^(-2i / R). Channels from R on are unchanged
(--rotary-percent).
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_zpp.config.model import ModelConfig

# In all published models of Llama 3.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192
Part: TypeAlias = Callable[[Tensor], Tensor]  # (B, S, …) of whole texts -> of some of their tokens, (B, T, …)


def whole(x: Tensor) -> Tensor:
    """All tokens."""
    return x


def positions_per_radian(rotated: int, base: float) -> Tensor:
    """Return the inverse frequency of each pair of channels (R / 2), fp32."""
    # On the CPU: all devices rotate by the same angles, and the model may be built on the meta device.
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    return base**exponents


def llama3_scaled(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling of frequencies (R / 2); Hugging Face's rope_type "llama3".

    Wavelengths above original positions / low_freq_factor are multiplied by `factor`, wavelengths below
    original positions / high_freq_factor are unchanged, and frequencies between them are interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    periods = _ORIGINAL_POSITIONS / wavelengths
    share = (periods - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    share = share.clamp(0.0, 1.0)  # 1 keeps the frequency, 0 divides it by the factor
    return frequencies * share + frequencies / factor * (1 - share)


def yarn_scaled(
    frequencies: Tensor,
    factor: float,
    base: float,
    original: float,
    beta_fast: float,
    beta_slow: float,
    *,
    rounds: bool,
) -> Tensor:
    """YaRN (2309.00071, 3.2): pairs that turn often in a text of `original` tokens keep their frequency.

    Frequencies (R / 2) of pairs that turn at most `beta_slow` times are divided by `factor`. Those of pairs
    that turn at least `beta_fast` times are unchanged. Between these, they are interpolated by the number of
    the pair. `rounds`: the ends of that range are whole numbers.
    """
    pairs = len(frequencies)

    def pair(turns: float) -> float:
        """The number, not rounded, of the pair that turns so often in a text of the original length."""
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(base)

    first, last = pair(beta_fast), pair(beta_slow)
    if rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    numbers = torch.arange(pairs, device="cpu")
    share = ((numbers - first) / (last - first or 0.001)).clamp(0.0, 1.0)  # 0 keeps, 1 divides
    return frequencies / factor * share + frequencies * (1 - share)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one forward pass, shared by all layers: each (B or 1, T, 1, R / 2) fp32.

    The axis of size 1 stands for heads, so that tensor parallelism may split them. Without cosines (positions
    are learned or absent) heads stay as they are. `interleaved`: neighbouring channels are pairs.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    @property
    def rotates(self) -> bool:
        """Whether positions are rotations at all."""
        return self.cos is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first R channels of x (B, T, N, H); computes in fp32, returns the format of x."""
        if self.cos is None or self.sin is None:
            return x
        half = self.cos.shape[-1]
        if self.interleaved:
            pairs, rest = x.split([2 * half, x.shape[-1] - 2 * half], -1)
            first, second = pairs.unflatten(-1, (half, 2)).unbind(-1)
        else:
            first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        a, b = first.float(), second.float()
        rotated = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        parts = [part.to(x.dtype) for part in rotated]
        if self.interleaved:
            parts = [torch.stack(parts, -1).flatten(-2)]
        return torch.cat([*parts, rest], -1)


UNROTATED = Rotation()


@dataclass(eq=False)
class RotaryEmbedding:
    """The rotation of each position, by `frequencies` (R / 2) fp32 in radians per position.

    Rotated channels are multiplied by `attention_factor` too. With LongRoPE (2402.13753) frequencies are
    (2, R / 2): those of texts of at most `original` tokens, and of longer ones. A text is what positions
    count without a break, so that each document of a row has its own.
    """

    frequencies: Tensor
    _: KW_ONLY
    interleaved: bool = False
    attention_factor: float = 1.0
    original: int | None = None

    def rotation(self, positions: Tensor, part: Part = whole) -> Rotation:
        """Return the rotation of a `part` of positions (B or 1, T)."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        frequencies = self.frequencies
        if self.original is not None:
            short, long = frequencies
            is_long = part(_text_lengths(positions) > self.original)
            frequencies = torch.where(is_long[..., None, None], long, short)
        angles = part(positions)[..., None, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()  # each (B or 1, T, 1, R / 2)
        if self.attention_factor != 1:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Rotation(cos, sin, self.interleaved)


def _text_lengths(positions: Tensor) -> Tensor:
    """The tokens of the text in which each of positions (B, T) is."""
    tokens = positions.shape[1]
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[:, :-1] = positions[:, 1:] != positions[:, :-1] + 1
    columns = torch.arange(tokens, device=positions.device)
    ends = torch.where(is_last, columns, tokens).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, ends) + 1


def rotary_embeddings(config: ModelConfig) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """The rotations of a model's layers, and those of layers with a window where they have others."""
    if not config.rotary:
        return None, None
    local, interleaved = None, config.rotary_interleaved
    if config.rotary_base_local is not None:
        of_windows = 1.0 / positions_per_radian(config.rotated_channels, config.rotary_base_local)
        local = RotaryEmbedding(of_windows, interleaved=interleaved)
    usual = RotaryEmbedding(
        _frequencies(config),
        interleaved=interleaved,
        attention_factor=config.rotary_attention_factor,
        original=config.longrope_limit,
    )
    return usual, local


def _frequencies(config: ModelConfig) -> Tensor:
    """Those of RotaryEmbedding; ModelConfig.check has filled what they depend on."""
    inverse = positions_per_radian(config.rotated_channels, config.scaled_rotary_base)
    if config.position_embedding_type == "longrope":
        factors = [config.longrope_short_factor, config.longrope_long_factor]
        return 1.0 / (torch.tensor(factors, device="cpu") * inverse)
    found = 1.0 / inverse
    if config.position_embedding_type == "yarn":
        given = config.rotary_scaling_factor, config.rotary_base, config.yarn_original_max_position_embeddings
        betas = config.yarn_beta_fast, config.yarn_beta_slow
        numbers = (number for number in (*given, *betas) if number is not None)
        return yarn_scaled(found, *numbers, rounds=config.yarn_correction_range_round_to_int)
    if config.use_rope_scaling:
        assert config.rope_scaling_factor is not None
        return llama3_scaled(found, config.rope_scaling_factor)
    # Positional interpolation (2306.15595) divides positions.
    return found / (config.rotary_seq_len_interpolation_factor or 1.0)
