"""What --fp8-param-gather does not go with."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from tests.train.test_fp8_scaling import FLAGS


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--bf16 --fp8 --fp8-recipe tensorwise", "--fp8-param-gather (given): needs --fp8-recipe delayed"),
        ("--bf16", "--fp8-param-gather (given): needs --fp8"),
        (
            "--bf16 --fp8 --fp8-recipe delayed --zero-stage 3 --zero-quantized-weights",
            "--fp8-param-gather (given): gathers the 8-bit codes that are multiplied, and "
            "--zero-quantized-weights in int8 would gather other codes; use "
            "--zero-quantized-weights-format delta4 or delta2, or omit --zero-quantized-weights to gather a "
            "byte per weight, or omit --fp8-param-gather",
        ),
        (
            "--bf16 --fp8 --fp8-recipe delayed --zero-offload-optimizer",
            "--fp8-param-gather (given): encodes weights on the device; omit --zero-offload-optimizer, or "
            "omit --fp8-param-gather",
        ),
    ],
)
def test_what_does_not_work_is_refused(flags: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        parse_args([*FLAGS, "--fp8-param-gather", *flags.split()])
