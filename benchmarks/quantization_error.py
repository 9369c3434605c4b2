"""Errors of a layer's weights from quantisation, biases that become zero, and the bytes of alternatives.

python benchmarks/quantization_error.py   writes benchmarks/results/quantization_error.json; CPU, seconds

Three layouts of the parameters of a layer that have no weight decay (gains of norms, biases), which are next
to each other in the flat buffer.

    packed    each begins at a multiple of 128 elements, so that a block can have both gains and biases
    aligned   each begins at a block's first element
    bf16      packed, and not quantised
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import refuse_options, write_result
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import CodeType, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.build import in_order, layouts_of
from megatron_zpp.zero.flat_layout import SHARD_MULTIPLE, FlatLayout

WIDTHS, BLOCKS = (320, 1024, 1600, 4096), (256, 2048)
WEIGHT_STD, GAIN_STD, BIAS_STD = 0.02, 0.02, 0.003
MODELS = {"tiny (2 x 64)": (2, 64, 512), "125M": (12, 768, 50304), "1.3B": (24, 2048, 50304)}  # layers, D, V
RANKS = (1, 8, 64)
ORACLE = Operations(reference, compiled=False)


def main() -> None:
    """Compute all figures; random numbers come from fixed seeds."""
    refuse_options(__doc__)
    figures = {
        "distributions": {"weights": WEIGHT_STD, "gains": [1.0, GAIN_STD], "biases": BIAS_STD},
        "vanished_and_errors": [
            row for width in WIDTHS for block in BLOCKS for row in layer_rows(width, block)
        ],
        "bytes": [row for name, shape in MODELS.items() for row in byte_rows(name, *shape)],
        "extremes": [
            extremes(code_type, dtype) for code_type in ("int4", "int8") for dtype in ("bfloat16", "float32")
        ],
    }
    write_result("quantization_error", figures)


def model(layers: int, width: int, vocab: int) -> GPT:
    """A model on the meta device."""
    config = ModelConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=width // 64, seq_length=1024
    )
    with torch.device("meta"):
        return GPT(config, vocab)


def layouts(
    modules: list[tuple[str, nn.Module]], ranks: int, block: int, *, aligned: bool
) -> list[FlatLayout]:
    """The layouts of the units in a run with blocks of this size."""
    return layouts_of(modules, ranks, max(block, SHARD_MULTIPLE), block if aligned else 1)


def layer_rows(width: int, block: int) -> list[dict[str, Any]]:
    """Errors of a layer's gains and biases, encoded as int8 and decoded to bf16."""
    modules = model(1, width, 512).units()[1:2]
    rows = []
    for layout_name in ("packed", "aligned", "bf16"):
        (layout,) = layouts(modules, 1, block, aligned=layout_name == "aligned")
        flat, kinds = drawn(modules[0][1], layout, block)
        arrived = (
            flat.bfloat16() if layout_name == "bf16" else there_and_back(flat, QuantFormat("int8", block))
        )
        row: dict[str, Any] = {"width": width, "block": block, "layout": layout_name}
        for kind, mask in kinds.items():
            x, y = flat[mask], arrived.float()[mask]
            row[f"{kind}_vanished"] = round((y == 0).float().mean().item(), 4)
            row[f"{kind}_relative_rms_error"] = float(f"{((y - x).norm() / x.norm()).item():.3g}")
        rows.append(row)
    return rows


def drawn(layer: nn.Module, layout: FlatLayout, block: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The blocks with gains or biases of a unit's flat fp32 buffer, and a mask of the elements of each kind.

    Weights before them may share their first block.
    """
    generator = torch.Generator().manual_seed(1)
    begin = layout.offsets[layout.decayed] // block * block
    flat = WEIGHT_STD * torch.randn(layout.numel - begin, generator=generator)
    flat[layout.offsets[layout.decayed] - begin :] = 0
    kinds = {
        kind: torch.zeros(len(flat), dtype=torch.bool) for kind in ("gains", "norm_biases", "other_biases")
    }
    for (name, parameter), offset in list(zip(in_order(layer), layout.offsets, strict=False))[
        layout.decayed :
    ]:
        here = slice(offset - begin, offset - begin + parameter.numel())
        noise = torch.randn(parameter.numel(), generator=generator)
        is_bias = name.endswith("bias")
        flat[here] = BIAS_STD * noise if is_bias else 1 + GAIN_STD * noise
        kinds["gains" if not is_bias else "norm_biases" if "norm" in name else "other_biases"][here] = True
    return flat, kinds


def there_and_back(x: Tensor, quant_format: QuantFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`x` (n,), encoded and decoded."""
    message = torch.empty(1, quant_format.message_bytes(x.numel()), dtype=torch.uint8)
    ORACLE.quantize(x[None], message, quant_format)
    arrived = torch.empty(1, x.numel(), dtype=dtype)
    ORACLE.dequantize(message, arrived, quant_format)
    return arrived[0]


def byte_rows(name: str, layers: int, width: int, vocab: int) -> list[dict[str, Any]]:
    """Bytes of one gather of the whole model per parameter, and elements of its buffers per parameter."""
    modules = model(layers, width, vocab).units()
    parameters = [parameter for _, module in modules for parameter in module.parameters()]
    numel = sum(parameter.numel() for parameter in parameters)
    undecayed = sum(parameter.numel() for parameter in parameters if parameter.dim() < 2)
    rows = []
    for block in BLOCKS:
        for ranks in RANKS:
            row: dict[str, Any] = {"model": name, "parameters": numel, "block": block, "ranks": ranks}
            for layout_name in ("packed", "aligned"):
                found = layouts(modules, ranks, block, aligned=layout_name == "aligned")
                message = sum(
                    ranks * QuantFormat("int8", block).message_bytes(one.shard_numel) for one in found
                )
                row[f"{layout_name}_bytes_per_parameter"] = round(message / numel, 5)
                row[f"{layout_name}_elements_per_parameter"] = round(
                    sum(one.numel for one in found) / numel, 5
                )
            extra = (2 - QuantFormat("int8", block).block_bytes / block) * undecayed / numel
            row["bf16_bytes_per_parameter"] = round(row["packed_bytes_per_parameter"] + extra, 5)
            rows.append(row)
    return rows


def extremes(code_type: CodeType, dtype: str) -> dict[str, Any]:
    """Largest errors of a block's positive peak and of its negative counterpart; RMS error of normal numbers.

    The symmetric codes to compare with have the scale peak / (2^(b-1) - 1), in bf16 as here.
    """
    bits, block = {"int4": 4, "int8": 8}[code_type], 256
    x = torch.randn(4000, block, generator=torch.Generator().manual_seed(2))
    top = x.abs().amax(1, keepdim=True) * 1.0001
    x[:, :1], x[:, 1:2] = top, -top
    x = x.to(getattr(torch, dtype)).float()
    arrived = there_and_back(x.flatten(), QuantFormat(code_type, block), torch.float32).view(x.shape)
    peak = x[:, 0].abs()
    normal = torch.randn(4000, block, generator=torch.Generator().manual_seed(3))
    normal = normal.to(getattr(torch, dtype)).float()
    step = (normal.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).bfloat16().float()
    symmetric = (normal / step).round() * step
    signed = there_and_back(normal.flatten(), QuantFormat(code_type, block), torch.float32)
    signed = signed.view(x.shape)
    return {
        "code_type": code_type,
        "input": dtype,
        "scales": "bfloat16",
        "peak_largest_error_of_peak": ((arrived - x)[:, 0].abs() / peak).max().item(),
        "other_sign_largest_error_of_peak": ((arrived - x)[:, 1].abs() / peak).max().item(),
        "rms_error_over_symmetric": ((signed - normal).norm() / (symmetric - normal).norm()).item(),
    }


if __name__ == "__main__":
    main()
