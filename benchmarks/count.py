"""Counts how large the project is, beside another commit: lines, statements, results, flags, imports, docs.

python benchmarks/count.py [COMMIT] [--beside 5fb76f59]   without COMMIT: the files of the working tree

Lines and statements are of Python; statements are those of the syntax tree, so that nothing is won by width.
Fault campaigns count with benchmarks, also where tests/faults/ held them. Flags and imports are counted by
running the commit's own pretrain_gpt.py: its --help, and one step on a CPU. Docs are README.md and docs/.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import ROOT, program_parser

STEP = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 1 --hidden-size 16 "
    "--num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--device cpu"
)
LISTED = "import pretrain_gpt, sys; pretrain_gpt.main(); print(*sys.modules, sep='\\n')"
TARGETS = {  # of issue 50
    "package: lines": 46_500,
    "tests: lines": 40_000,
    "benchmarks: lines": 11_000,
    "files under benchmarks/results": 60,
    "flags in --help": 160,
    "modules imported by a smallest run": 220,
    "docs: lines": 5_000,
}


def files_of(commit: str | None, directory: Path) -> list[Path]:
    """The files of a commit, written to a directory; or those of the working tree that git knows."""
    if commit is None:
        git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]
    with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(directory)], stdin=archive.stdout, check=True)
    if archive.returncode:
        raise SystemExit(f"{commit}: no such commit")
    return [path for path in directory.rglob("*") if path.is_file()]


def figures_of_python(files: Iterable[Path]) -> dict[str, float]:
    """Lines, statements, docstrings' share of all lines, and the mean length of lines that are not empty."""
    lines, statements, documented, lengths = 0, 0, 0, []
    for file in files:
        text = file.read_text()
        lines += len(text.splitlines())
        lengths += [len(line) for line in text.splitlines() if line.strip()]
        for node in ast.walk(ast.parse(text)):
            statements += isinstance(node, ast.stmt)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                documented += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return {
        "lines": lines,
        "statements": statements,
        "docstrings, % of lines": round(100 * documented / lines, 1),
        "mean line length": round(sum(lengths) / len(lengths), 1),
    }


def run(root: Path, *argv: str) -> str:
    """What a program of a commit prints."""
    done = subprocess.run([sys.executable, *argv], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{argv[-1]} failed:\n{done.stderr}")
    return done.stdout


def count(commit: str | None) -> dict[str, float]:
    """All figures of a commit, or of the working tree."""
    with tempfile.TemporaryDirectory() as directory:
        root = ROOT if commit is None else Path(directory)
        files = {str(path.relative_to(root)): path for path in files_of(commit, root)}
        held = "tests/faults/" if "tests/faults/campaign.py" in files else "benchmarks/faults/"
        places: dict[str, list[Path]] = {"package": [], "tests": [], "benchmarks": []}
        for name, path in files.items():
            folder = "benchmarks" if name.startswith(held) else name.partition("/")[0]
            folder = {"megatron_zpp": "package"}.get(folder, folder)
            if name.endswith(".py") and folder in places:
                places[folder].append(path)
        found: dict[str, float] = {}
        for place, paths in places.items():
            found |= {f"{place}: {name}": figure for name, figure in figures_of_python(paths).items()}
        results = [name for name in files if name.startswith("benchmarks/results/")]
        pages = [name for name in files if re.fullmatch(r"README\.md|docs/.*\.md", name)]
        helped = run(root, "pretrain_gpt.py", "--help", "all")
        modules = run(root, "-c", LISTED, *STEP.split()).splitlines()
        return found | {
            "files under benchmarks/results": len(results),
            "flags in --help": len(set(re.findall(r"^  (--[\w-]+)", helped, flags=re.MULTILINE))),
            "modules imported by a smallest run": sum(name.startswith("megatron_zpp") for name in modules),
            "docs: lines": sum(len(files[name].read_text().splitlines()) for name in pages),
        }


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("commit", nargs="?", help="default: the working tree")
    parser.add_argument("--beside", default="5fb76f59", metavar="COMMIT", help="default: %(default)s")
    options = parser.parse_args()
    before, now = count(options.beside), count(options.commit)
    print(f"| figure | {options.beside} | {options.commit or 'tree'} | at most |")
    print("| --- | --- | --- | --- |")
    for name, figure in now.items():
        target = TARGETS.get(name)
        print(f"| {name} | {before[name]:,} | {figure:,} | {f'{target:,}' if target else ''} |")


if __name__ == "__main__":
    main()
