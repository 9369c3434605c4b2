"""Products of 8-bit floats by the GPU's own units, whose fast sums keep 13 bits of the fraction."""

import pytest
import torch

from tests.model.test_fp8 import check_products

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not CAPABLE, reason="needs a GPU of compute capability 8.9")
@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 32, 48), (256, 1024, 512), (4096, 2048, 2048)])
def test_products_are_within_what_the_codes_allow(rows: int, inner: int, outer: int) -> None:
    check_products(rows, inner, outer, torch.bfloat16, "cuda", fast=2.0**-13)
