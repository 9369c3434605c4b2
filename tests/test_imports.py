"""What few runs need, takes long to import, or may be missing, is imported by what needs it alone."""

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import megatron_zpp
from tests.config.command_line import SMALLEST
from tests.support import run

OPTIONAL = "wandb datasets matplotlib apex sentencepiece tokenizers tensorboard zstandard transformers"
SLOW = "sympy torch._dynamo triton"  # half a second to two, which each start and each rank would pay
SET_APART = (
    "api checkpoint.foreign checkpoint.huggingface checkpoint.object_saves config.legacy data.islands "
    "data.megatron data.text generate model.fp8 model.fused model.parallel ops.library plan reporting.report "
    "storage.hub storage.objects train.islands train.outer_alone train.saving train.steps.sampled_text "
    "zero.fused config.help config.sources.huggingface islands"
)
MOST = 180  # modules of the package


@functools.cache
def imported() -> frozenset[str]:
    """The modules that a smallest run has imported when it ends."""
    done = run(
        "-c",
        "import sys, pretrain_gpt\npretrain_gpt.main()\nprint(*sys.modules)",
        *(*SMALLEST, "--device", "cpu", "--num-layers", "2", "--eval-iters", "1", "--zero-stage", "0"),
    )
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.splitlines()[-1].split())


def test_a_run_that_does_not_need_optional_packages_does_not_import_them() -> None:
    assert not imported() & {*OPTIONAL.split(), *SLOW.split()}


def test_a_smallest_run_imports_nothing_that_is_set_apart() -> None:
    own = {name for name in imported() if name.partition(".")[0] == "megatron_zpp"}
    apart = tuple(f"megatron_zpp.{name}" for name in SET_APART.split())
    assert not {name for name in own if f"{name}.".startswith(tuple(f"{each}." for each in apart))}
    assert len(own) <= MOST, f"{len(own)} modules; import what few runs need where it is needed"


def imported_by(code: ast.AST) -> Iterator[str]:
    """What a module imports anywhere, also inside functions, but for types alone."""
    if isinstance(code, ast.If) and ast.unparse(code.test) == "TYPE_CHECKING":
        return
    if isinstance(code, ast.Import):
        yield from (name.name for name in code.names)
    elif isinstance(code, ast.ImportFrom):
        yield from (str(code.module), *(f"{code.module}.{name.name}" for name in code.names))
    for part in ast.iter_child_nodes(code):
        yield from imported_by(part)


def test_no_modules_import_each_other() -> None:
    package = Path(megatron_zpp.__file__).parent
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for path in package.rglob("*.py")
    }
    graph = {name: {*imported_by(ast.parse(path.read_text()))} & {*paths} for name, path in paths.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
