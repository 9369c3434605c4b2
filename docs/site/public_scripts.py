"""The table of guide/public_scripts.md: what becomes of each public launch script."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, MARKER = "guide/public_scripts.md", "<!-- the site has the tables here -->"
RESULT, SCRIPTS = ROOT / "benchmarks/results/public_scripts.json", ROOT / "benchmarks/public_scripts.txt"


def tables() -> str:
    """A table for each repository, in markdown."""
    figures = json.loads(RESULT.read_text())["figures"]
    ranks = dict(line.split()[:2] for line in SCRIPTS.read_text().splitlines())
    lines = []
    for repository in figures["repositories"]:
        name, commit = repository.split()
        lines += [f"## {name} at {commit}", "", "| script | ranks | here |", "| --- | --- | --- |"]
        start = f"{name.partition('/')[2]}/"
        for path, fate in figures["scripts"].items():
            if path.startswith(start):
                of = ranks[path].replace("x", " × ")
                lines.append(f"| `{path.removeprefix(start)}` | {of} | {short(fate)} |")
        lines.append("")
    return "\n".join(lines)


def short(fate: str) -> str:
    """An outcome, of a script that is refused with the names of what it lacks."""
    missing = dict.fromkeys(re.findall(r"not supported: ([^;]+)", fate))
    return f"refused: {', '.join(missing)}" if fate.startswith("refused") and missing else fate
