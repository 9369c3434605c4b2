"""The table of guide/models.md: which families have which pieces of a model, and which tests check each.

families.txt has a line for each piece, with the cases of tests/model/families.py that have it. All cases are
compared with transformers; `python -m tests.model.families` writes the file, and a test reads it.
"""

import dataclasses
import re
from pathlib import Path

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_of

ROOT = Path(__file__).resolve().parents[2]
PAGE, MARKER = "guide/models.md", "<!-- the site has the table here -->"
CASES = Path(__file__).with_suffix(".txt")
TESTS = ("model", "generate", "checkpoint/foreign", "zero", "train", "gpu")  # folders of tests/


def cases() -> dict[str, list[str]]:
    """The cases that have each piece, by the field of ModelConfig."""
    lines = [line.split() for line in CASES.read_text().splitlines()]
    return {piece: found for piece, *found in lines}


def naming_files(piece: str) -> list[str]:
    """The files of tests that name a piece by its field or its flag."""
    flag = flag_of(ModelConfig.__dataclass_fields__[piece])
    named = re.compile(rf"(?<![\w-])({piece}|{flag})(?![\w-])")
    files = [file for folder in TESTS for file in sorted((ROOT / "tests" / folder).glob("*.py"))]
    return [str(file.relative_to(ROOT / "tests")) for file in files if named.search(file.read_text())]


def table() -> str:
    """A row for each piece, in markdown."""
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    rows = ["| flag | what it does | families | tests that name it |", "| --- | --- | --- | --- |"]
    for piece, found in cases().items():
        (first, *_) = re.split(r"(?<=[a-z)0-9])[.;] ", fields[piece].metadata["help"])
        families = ", ".join(dict.fromkeys(case.partition("-")[0] for case in found))
        tests = ", ".join(f"`{name}`" for name in naming_files(piece))
        cells = (f"`{flag_of(fields[piece])}`", first.rstrip(".").replace("|", "or"), families, tests)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
