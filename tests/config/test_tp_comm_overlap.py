"""--tp-comm-overlap: what it is refused with, and what it changes."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from megatron_zpp.config.tensor_parallel import OVERLAPPED, TokenPieces
from tests.config.command_line import MINIMAL, without

FLAG = "--tp-comm-overlap"
SHARED = [*MINIMAL, "--tensor-model-parallel-size", "2"]
LONG = [*without("--seq-length"), "--tensor-model-parallel-size", "2", "--seq-length", "1024"]


def test_it_is_off_by_default_and_shares_tokens_in_pieces() -> None:
    assert parse_args(LONG).token_pieces == TokenPieces()
    assert parse_args([*LONG, FLAG]).token_pieces == OVERLAPPED


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            [*LONG, "--bf16", "--fp8"],
            "needs 16-bit products: those of --fp8 take the tokens of all ranks at once; omit one of them",
        ),
        (MINIMAL, "needs --tensor-model-parallel-size 2 or more: one rank exchanges no activations"),
        (
            SHARED,
            "cuts the 64 tokens of a micro-batch into 2 to 4 equal pieces, each of at least 1024 and a "
            "multiple of --tensor-model-parallel-size 2; possible: --micro-batch-size 64",
        ),
        (
            [*LONG, "--seq-length", "1022"],  # twice 1,022 are too few, and thrice are three times 1,022
            "cuts the 2044 tokens of a micro-batch into 2 to 4 equal pieces, each of at least 1024 and a "
            "multiple of --tensor-model-parallel-size 2; possible: --micro-batch-size 4",
        ),
    ],
)
def test_what_makes_no_pieces_is_refused(argv: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{FLAG} (given): {error}')}$"):
        parse_args([*argv, FLAG])
    possible = error.partition("possible: ")[2].split()
    if possible:
        parse_args([*argv, FLAG, *possible])
