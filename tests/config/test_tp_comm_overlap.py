"""--tp-comm-overlap: what it is refused with."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from tests.config.command_line import MINIMAL

FLAG = "--tp-comm-overlap"
SHARED = [*MINIMAL, "--tensor-model-parallel-size", "2"]


def test_it_is_off_by_default() -> None:
    assert not parse_args(SHARED).distributed.tp_comm_overlap
    assert parse_args([*SHARED, FLAG]).distributed.tp_comm_overlap


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            [*SHARED, "--bf16", "--fp8"],
            "needs 16-bit products: those of --fp8 take the tokens of all ranks at once; omit one of them",
        ),
        (MINIMAL, "needs --tensor-model-parallel-size 2 or more: one rank exchanges no activations"),
    ],
)
def test_what_cannot_overlap_is_refused(argv: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{FLAG} (given): {error}')}$"):
        parse_args([*argv, FLAG])
