"""Which kernel computes attention."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option

AttentionBackend = Literal[
    "auto", "math", "efficient", "flash", "cudnn", "flash3", "fused", "unfused", "local"
]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Options):
    """attention: whose kernel computes it"""

    attention_backend: AttentionBackend = option(
        "auto",
        "auto: what suits device, format and masks. Others insist: math, efficient, flash and cudnn are "
        "torch's; flash3 is FlashAttention-3's package flash_attn_interface; fused is Megatron-LM's name of "
        "cudnn, unfused and local are its names of math.",
    )
