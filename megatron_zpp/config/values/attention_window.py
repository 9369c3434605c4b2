"""--window-size and --window-attn-skip-freq: which layers attend to a window of tokens, and how many."""

import ast
from collections.abc import Sequence
from itertools import groupby

from megatron_zpp.config.options import option_error

SIZE, FREQUENCY = "--window-size", "--window-attn-skip-freq"
_LONGEST = 4096  # characters of a pattern


def parse_window(value: str) -> int | None:
    """Return the tokens that a token attends to, itself included, for Megatron-LM's "LEFT,RIGHT".

    LEFT counts the tokens before it; -1 stands for all of them, for which the result is None. RIGHT is 0:
    attention is causal.
    """
    numbers = value.strip().removeprefix("(").removesuffix(")").split(",")
    try:
        left, right = map(int, numbers)
    except ValueError:
        raise option_error(SIZE, value, "must be LEFT,0, such as 4095,0") from None
    if right != 0:
        raise option_error(SIZE, value, f"attention is causal, so the second number must be 0, not {right}")
    if left < -1:
        raise option_error(SIZE, value, "the first number must be at least 0, or -1 for all tokens before")
    return None if left == -1 else left + 1


def parse_pattern(
    value: str, layers: int, flag: str = FREQUENCY, words: tuple[str, str] = ("window", "none")
) -> tuple[bool, ...]:
    """Return whether each layer has the window, for Megatron-LM's frequency of layers without one.

    N: each N-th layer has none. A Python list of 1 (window) and 0 (none), of which sums and multiples are
    allowed: "([1]*5+[0])*4". `words` say what 1 and 0 mean in the list of another `flag`.
    """
    if value.strip().isdecimal():
        every = int(value)
        if every == 0:
            raise option_error(flag, value, "must be at least 1")
        return tuple(layer % every != 0 for layer in range(1, layers + 1))
    one, zero = words
    fix = f"must be a number, or a Python list with a 1 ({one}) or 0 ({zero}) for each of {layers} layers"
    try:
        if len(value) > _LONGEST:
            raise ValueError
        found = _evaluate(ast.parse(value.strip(), mode="eval").body, layers)
    except (ValueError, SyntaxError, RecursionError):
        raise option_error(flag, value[:80], fix) from None
    if not isinstance(found, list) or len(found) != layers:
        has = f"{len(found)} entries" if isinstance(found, list) else "none"
        raise option_error(flag, value, f"{fix}; it has {has}")
    return tuple(entry == 1 for entry in found)


def describe_pattern(windowed: Sequence[bool]) -> str | None:
    """Return the shortest value of --window-attn-skip-freq for layers; None if all have the window."""
    if all(windowed):
        return None
    every = list(windowed).index(False) + 1
    if tuple(windowed) == parse_pattern(str(every), len(windowed)):
        return str(every)
    return "+".join(f"[{int(value)}]*{len(list(run))}" for value, run in groupby(windowed))


def _evaluate(node: ast.expr, longest: int) -> list[int] | int:
    """Return the value of a sum or product of lists and numbers; products have at most `longest` entries."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= longest:
        return node.value
    if isinstance(node, ast.List):
        entries = [_evaluate(entry, 1) for entry in node.elts[: longest + 1]]
        if any(isinstance(entry, list) for entry in entries):
            raise ValueError
        return [entry for entry in entries if isinstance(entry, int)]
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left, right = _evaluate(node.left, longest), _evaluate(node.right, longest)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(left, int):
        left, right = right, left
    if not (isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)):
        raise ValueError
    if len(left) * right > longest:  # asked before it is made: a flag must not take a machine's memory
        raise ValueError
    return left * right
