"""The small bugs that run.py plants: where in a file, and what stands there instead.

| operator | changes |
| --- | --- |
| comparison | `<` and `<=`, `>` and `>=`, `==` and `!=`, `is` and `is not`, `in` and `not in` swapped |
| arithmetic | `+` and `-`, `*` and `//` swapped, also with `=`; `%` to `//` |
| boolean | `and` and `or` swapped; drops `not`; negates a condition |
| integer | a constant plus or minus one |
| slice | a bound plus one |
| statement | deletes a call, `+=` and the like, an assignment to an element, or later to an attribute |
| keyword | drops a keyword argument |
| loop | `continue` and `break` swapped |

Declarations and words stay: type hints, decorators, docstrings, f-strings, `__all__`, assertions, `raise`
and its arguments, and calls that only tell somebody something.
"""

import ast
import copy
import re
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
TELLING = {"print", "say", "tell", "warn", "_warn", "report", "log", "info"}


@dataclass(frozen=True)
class Mutation:
    """A change of the source between two offsets of its UTF-8 bytes, at a line."""

    operator: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The source with the bug."""
        encoded = source.encode()
        return (encoded[: self.start] + self.after.encode() + encoded[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """All bugs that can be planted in a file, in its order."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda one: (one.line, one.start, one.end, one.operator, one.after))


def imported_lines(source: str) -> set[int]:
    """Lines outside of functions: those that Python executes when the file is imported."""
    lines = set(range(1, source.count("\n") + 2))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            lines -= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Mutation] = []
        self._function = ""
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or _tells(node):
            return
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return
        self._mutate(node)
        around = self._function
        if isinstance(node, ast.FunctionDef):
            self._function = node.name
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)
        self._function = around

    def _mutate(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            self._changed("comparison", node, ops=[COMPARISONS[type(node.ops[0])]()])
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
            self._changed("arithmetic", node, op=ARITHMETIC[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            self._changed("boolean", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._replaced("boolean", node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for value in (node.value - 1, node.value + 1):
                self._replaced("integer", node, f"({value})")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    comma = re.compile(rb"\s*,").match(self._source, self._offsets(keyword)[1])
                    self._replaced("keyword", keyword, "", len(comma[0]) if comma else 0)
        elif isinstance(node, (ast.Continue, ast.Break)):
            self._replaced("loop", node, "break" if isinstance(node, ast.Continue) else "continue")
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            self._replaced("boolean", node.test, f"(not ({ast.unparse(node.test)}))")
        if isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    self._replaced("slice", bound, f"({ast.unparse(bound)} + 1)")
        if self._can_go(node):
            self._replaced("statement", node, "pass")

    def _can_go(self, node: ast.AST) -> bool:
        """Whether a line that runs later can do without what this statement binds."""
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call) and not _tells(node.value)
        if isinstance(node, ast.Assign):
            kinds = ast.Subscript if self._function == "__init__" else (ast.Attribute, ast.Subscript)
            return all(isinstance(target, kinds) for target in node.targets)
        return isinstance(node, ast.AugAssign)

    def _changed(self, operator: str, node: Any, **fields: Any) -> None:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        text = ast.unparse(changed)
        self._replaced(operator, node, text if isinstance(node, ast.stmt) else f"({text})")

    def _replaced(self, operator: str, node: Any, after: str, more: int = 0) -> None:
        """`more` bytes behind the node go, too."""
        start, end = self._offsets(node)
        before = self._source[start : end + more].decode()
        self.found.append(Mutation(operator, node.lineno, start, end + more, before, after))

    def _offsets(self, node: Any) -> tuple[int, int]:
        starts = self._starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _tells(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in TELLING
