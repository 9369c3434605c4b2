"""Rotary position embedding (RoFormer paper, 3.4.2), with the frequency scaling of Llama 3.1.

Shapes: B batch, T tokens, N heads (of queries, or groups of keys), H head width, R rotated channels, R <= H.

Channels i and i + R/2 of a head form a pair, as in Megatron-LM and Hugging Face; the angle of pair i is
position · base^(-2i / R). Channels from R on are unchanged (--rotary-percent).
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# In all published models of Llama 3.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (positional interpolation, 2306.15595)."""

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        """(R / 2) frequencies in radians per position -> scaled frequencies."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of frequencies; Hugging Face's rope_type "llama3".

    Wavelengths above original positions / low_freq_factor are multiplied by `factor`, wavelengths below
    original positions / high_freq_factor are unchanged, and frequencies between them are interpolated.
    """

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        """(R / 2) frequencies in radians per position -> scaled frequencies."""
        wavelengths = 2 * math.pi / frequencies
        periods = _ORIGINAL_POSITIONS / wavelengths
        share = (periods - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
        share = share.clamp(0.0, 1.0)  # 1 keeps the frequency, 0 divides it by the factor
        return frequencies * share + frequencies / self.factor * (1 - share)


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling


def frequencies(rotated: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the fp32 frequency of each pair of channels (R / 2), in radians per position."""
    # On the CPU: all devices rotate by the same angles, and the model may be built on the meta device.
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    found = 1.0 / base**exponents
    return scaling.apply(found) if scaling else found


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one forward pass, shared by all layers: each (B or 1, T, 1, R / 2) fp32.

    The axis of size 1 stands for heads, so that tensor parallelism may split them. Without cosines (positions
    are learned or absent) heads stay as they are.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None

    @property
    def rotates(self) -> bool:
        """Whether positions are rotations at all."""
        return self.cos is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first R channels of x (B, T, N, H); computes in fp32, returns the format of x."""
        if self.cos is None or self.sin is None:
            return x
        half = self.cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        a, b = first.float(), second.float()
        rotated = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat([*(part.to(x.dtype) for part in rotated), rest], -1)


UNROTATED = Rotation()


class RotaryEmbedding:
    """The rotation of each position, for R rotated channels."""

    def __init__(self, rotated: int, base: float, scaling: RopeScaling | None = None) -> None:
        self._frequencies = frequencies(rotated, base, scaling)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of positions (B or 1, T)."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self._frequencies  # (B or 1, T, 1, R / 2)
        return Rotation(angles.cos(), angles.sin())
