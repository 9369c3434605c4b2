"""Figures on pages are those of benchmarks/results/: each marker says where the figures of a block come from.

A marker is a comment before a table or a paragraph. It names result files, which may be entered at a path,
and has a line for each row of the table, or one for the paragraph, with the source of each figure, in order:

    <!-- figures d=zero_speed_1.3b:contestants
    one_gpu = d/*/milliseconds; d/*/interval_ms
    stage_3
    = d/stage_3/milliseconds over d/one_gpu/milliseconds; 2
    -->

`*` is what the line begins with; a line without sources has those of the line above it; a list is as many
figures as it has; `median(d/list/[]/key)` is one figure of all its parts; `-` skips a row. A figure may be
rounded. Names of models and GPUs (1.3B, H100), code, links and the first column of a table are no figures.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from benchmarks.common import RESULTS
from tests.docs.blocks import PAGES

ROOT = Path(__file__).resolve().parents[2]
MARKER = re.compile(r"^<!-- figures (.*?)\n(.*?)^-->\n+(.*?)(?:\n\n|\Z)", flags=re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[+−-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
FUNCTIONS = {"median": median, "most": max, "number": len}  # of a list
MARKED = [page for page in PAGES if "<!-- figures " in page.read_text()]


def figures_in(text: str) -> list[str]:
    """The numbers of a piece of a page, as they are written."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", text)
    words = re.findall(r"[\w.,+−-]+", text)
    words = [word.strip(".,") for word in words]
    return [word for word in words if NUMBER.fullmatch(word)]


def rows_of(block: str) -> list[str]:
    """The rows of a table without its head and first column, or a paragraph."""
    if not block.startswith("|"):
        return [block]
    return [line.split("|", 2)[2] for line in block.splitlines()[2:]]


def value_at(path: str, files: dict[str, object]) -> object:
    """What a path names, or a number."""
    alias, *keys = path.strip().split("/")
    if not keys:
        return float(alias)
    found = files[alias]
    for at, key in enumerate(keys):
        if key == "[]":
            return [value_at("/".join(["one", *keys[at + 1 :]]), {"one": one}) for one in found]
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def sources(line: str, files: dict[str, object]) -> list[float]:
    """The values that a line of a marker names, with `*` replaced already."""
    found: list[float] = []
    for source in line.split(";"):
        path, divided, divisor = source.partition(" over ")
        path, _, factor = path.partition(" times ")
        call = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", path)
        value = FUNCTIONS[call[1]](value_at(call[2], files)) if call else value_at(path, files)
        if not isinstance(value, list):
            value = value * float(factor or 1) / (value_at(divisor, files) if divided else 1)
        found += value if isinstance(value, list) else [value]
    return found


def markers(page: Path) -> Iterator[tuple[str, list[float] | None]]:
    """Every row that a marker of a page describes, and the values of its sources; None if it is skipped."""
    for names, lines, block in MARKER.findall(page.read_text()):
        files = {}
        for alias, name, path in re.findall(r"(\w+)=([\w.-]+)(?::(\S+))?", names):
            files[alias] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
            for key in path.split("/") if path else ():
                files[alias] = files[alias][key]
        given, rows = "", rows_of(block)
        assert len(lines.splitlines()) == len(rows), f"{len(rows)} rows: {block[:80]}"
        for line, row in zip(lines.splitlines(), rows, strict=True):
            key, has_sources, its = line.partition("=")
            given = its if has_sources else given
            yield row, None if line == "-" else sources(given.replace("*", key.strip()), files)


def agrees(figure: str, value: float) -> bool:
    """Whether a value, rounded to as many places as the figure has, is the figure."""
    number = float(figure.replace(",", "").replace("−", "-"))
    places = len(figure.partition(".")[2])
    return abs(number - value) <= 0.5 * 10**-places + 1e-9


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_results(page: Path) -> None:
    wrong = []
    for row, values in markers(page):
        figures = figures_in(row)
        if values is None:
            continue
        if len(figures) != len(values) or not all(map(agrees, figures, values)):
            wrong.append(f"{row.strip()[:90]}\n  page: {figures}\n  file: {[round(v, 4) for v in values]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_result_that_a_marked_page_links_has_a_marker(page: Path) -> None:
    text = page.read_text()
    linked = set(re.findall(r"benchmarks/results/([\w.-]+)\.json", text))
    assert linked <= set(re.findall(r"\w+=([\w.-]+)", " ".join(match[0] for match in MARKER.findall(text))))


def test_the_pages_that_make_claims_are_marked() -> None:
    measurements = (ROOT / "docs" / "internals" / "measurements").glob("*.md")
    claims = {page for page in measurements if "benchmarks/results/" in page.read_text()}
    claims |= {ROOT / "README.md", ROOT / "docs" / "internals" / "performance.md"}
    claims |= {ROOT / "docs" / "guide" / name for name in ("zeropp.md", "fp8.md", "formats.md")}
    assert claims <= set(MARKED)
