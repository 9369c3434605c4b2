"""Holds pages to their measure: words of sentences, characters of cells, rows of the glossary, all lines."""

import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"
WORDS, CELL, ROWS, LINES = 30, 120, 80, 5000
# Pages that are not within the measure yet. Strike a page off when it is.
EXCEPTED = {"docs/internals/faults.md", "docs/internals/map.md"}
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if str(page.relative_to(ROOT)) not in EXCEPTED
}
NO_PROSE = re.compile(r"^ *```.*?^ *```$|^ {4,}\S[^\n]*$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and entries of lists, each on one line; of links their words alone."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", NO_PROSE.sub("", text)):
        if not paragraph.lstrip().startswith(("|", "#", "![")):
            yield re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split()))


def sentences(paragraph: str) -> list[str]:
    """What ends in a full stop, a question mark or a colon before a space; code counts as one word."""
    return re.split(r"(?<=[.?!:])[*)\"]* ", re.sub(r"`[^`]*`", "code", paragraph))


def words(sentence: str) -> int:
    return len(re.findall(r"\S*\w\S*", sentence))


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of a table."""
    for line in NO_PROSE.sub("", text).splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def shown(cell: str) -> int:
    """The characters of a cell that a reader sees: a link counts by its words."""
    return len(re.sub(r"\]\([^)]*\)", "", cell).replace("`", "").replace("[", ""))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    found = [s for p in paragraphs(PAGES[page].read_text()) for s in sentences(p) if words(s) > WORDS]
    assert not found


@pytest.mark.parametrize("page", PAGES)
def test_cells_are_short(page: str) -> None:
    assert not [cell for row in rows(PAGES[page].read_text()) for cell in row if shown(cell) > CELL]


def test_the_glossary_is_short() -> None:
    entries = [row for row in rows((DOCS / "glossary.md").read_text()) if row[0] not in ("word", "---")]
    assert 0 < len(entries) <= ROWS


def test_the_pages_are_few_lines() -> None:
    written = sum(len(page.read_text().splitlines()) for page in DOCS.rglob("*.md"))
    assert written <= LINES


def test_a_long_sentence_and_a_long_cell_would_be_noticed() -> None:
    long, short = "word " * 31, "word " * 30
    text = f"# T\n\n- {long}`a b`.\n- {short}.\n\n| a | {'c' * 121} |\n\n```\n{long}\n```\n<!-- {long}\n-->\n"
    assert [words(s) for p in paragraphs(text) for s in sentences(p)] == [32, 30, 0]
    assert [shown(cell) for row in rows(text) for cell in row] == [1, 121]
