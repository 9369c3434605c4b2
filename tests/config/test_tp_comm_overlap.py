"""--tp-comm-overlap: what it is refused with."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from tests.config.command_line import MINIMAL

FLAG = "--tp-comm-overlap"
SHARED = [*MINIMAL, "--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("more", "on_gpus", "on_cpus"),
    [
        ([], True, False),
        (["--bf16", "--fp8"], False, False),
        ([FLAG], True, True),
        (["--no-tp-comm-overlap"], False, False),
    ],
)
def test_the_default_is_on_where_it_pays(more: list[str], on_gpus: bool, on_cpus: bool) -> None:
    config = parse_args([*SHARED, *more])
    assert (config.overlaps_exchanges("cuda"), config.overlaps_exchanges("cpu")) == (on_gpus, on_cpus)


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
