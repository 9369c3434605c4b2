"""What --fp8-param-gather does not go with."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from tests.train.test_fp8_scaling import FLAGS


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--bf16 --fp8", "--fp8-param-gather (given): needs --fp8 and --fp8-recipe delayed"),
        ("--bf16", "--fp8-param-gather (given): needs --fp8 and --fp8-recipe delayed"),
        *(
            (
                f"--bf16 --fp8 --fp8-recipe delayed --zero-stage 3 --zero-quantized-weights{more}",
                "--fp8-param-gather (given): gathers the 8-bit codes that are multiplied, and "
                f"--zero-quantized-weights in {quant_format} would gather other codes; use "
                "--zero-quantized-weights-format delta4, delta3 or delta2, or omit "
                "--zero-quantized-weights to gather a byte per weight, or omit --fp8-param-gather",
            )
            for more, quant_format in (("", "int8"), (" --zero-quantized-weights-format int4", "int4"))
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
