"""Checks what pages name: links, headings, files, flags, words; and the pages that code names."""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_zpp.config.legacy.reasons import reason_of
from tests.docs.blocks import PAGES

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "docs" / "internals" / "map.md"
NOT_OURS = {".git", ".venv", "build", "mine", "quickstart", "wandb", "__pycache__"}  # what git does not keep
CODE = {".py", ".sh", ".sbatch", ".toml", ".txt", ".cu", ".cuh", ".cc", ".cpp", ".h", ".md"}
FOLDERS = "megatron_zpp tests csrc launch benchmarks docs data"
PATH = re.compile(rf"`((?:{FOLDERS.replace(' ', '|')})/[\w./*-]*)`")
# Flags in our pages of programs that are not ours.
FOREIGN = set(
    "--array --batch --bind --container-image --container-mounts --cpus-per-task --distribution "
    "--exclusive --gpu-bind --gpus-per-node --gpus-per-task --local-dir --lzma2 --me --mem "
    "--no-build-isolation --no-deps --nproc-per-node --ntasks-per-node --nv --oversubscribe --partition "
    "--requeue --signal --time --model_args --batch_size --tasks --model".split()
)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@cache
def files() -> tuple[Path, ...]:
    """Every text file of the repository."""
    found = []
    for directory, below, here in os.walk(ROOT):
        below[:] = [name for name in below if name not in NOT_OURS and not name.endswith("_cache")]
        found += [Path(directory) / name for name in here if Path(name).suffix in CODE]
    return tuple(found)


def prose(page: Path) -> str:
    """A page without its blocks of commands and output."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What `#…` may name in a page, by GitHub's rule."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(page: Path, title: str) -> Iterator[list[str]]:
    """The cells of the tables under a heading."""
    section = re.split(r"^#+ ", prose(page).split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def unresolved(page: Path) -> list[str]:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_resolve(page: Path) -> None:
    assert not unresolved(page)


def test_docs_named_in_code_exist() -> None:
    wrong = []
    for file in files():
        for path in re.findall(r"\bdocs/[\w/]+\.(?:md|png|txt)\b", file.read_text()):
            if "tests/docs/" not in path and not (ROOT / path).exists():
                wrong.append(f"{file.relative_to(ROOT)}: {path}")
        for title in re.findall(r"README\.md, ['\"]([^'\"]+)['\"]", file.read_text()):
            if f"## {title}\n" not in (ROOT / "README.md").read_text():
                wrong.append(f"{file.relative_to(ROOT)}: README.md, {title}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_named_on_pages_exist(page: Path) -> None:
    named = PATH.findall(prose(page))
    above = [ROOT, ROOT / "megatron_zpp"] if page.name == "glossary.md" else [ROOT]
    assert not [path for path in named if not any(any(folder.glob(path.rstrip("/"))) for folder in above)]


def test_the_map_lists_every_folder_and_the_files_to_start_at() -> None:
    table = {cells[0].strip("`"): cells[2] for cells in rows(MAP, "Folders")}
    code = {file.parent for file in files() if file.suffix in CODE - {".md", ".txt"}}
    packages = {path for path in code if path.is_relative_to(ROOT / "megatron_zpp")} - {ROOT / "megatron_zpp"}
    others = {ROOT / name for name in "benchmarks csrc data docs docs/site launch launch/slurm tests".split()}
    assert {f"{path.relative_to(ROOT)}/" for path in packages | others} <= table.keys()
    for folder, starts in table.items():
        for name in re.findall(r"`([\w-]+\.\w+)`", starts):
            assert (ROOT / folder / name).exists(), f"{folder}{name}"


def test_the_map_lists_every_file_of_zero() -> None:
    listed = [cells[0].strip("`") for cells in rows(MAP, "Files of `zero/`")][1:]
    there = [file for file in (ROOT / "megatron_zpp" / "zero").rglob("*.py") if file.name != "__init__.py"]
    assert sorted(listed) == sorted(names(there))


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)]+)\)", index.read_text())
    }
    assert set(PAGES) - {index} <= linked


@pytest.mark.parametrize("page", PAGES[1:], ids=names(PAGES[1:]))
def test_a_page_starts_with_its_readers(page: Path) -> None:
    if page.name == "index.md":
        return
    title, first = re.match(r"# ([^\n]+)\n\n(.+?)\n\n", page.read_text(), flags=re.DOTALL).groups()
    assert first.startswith("For "), title
    assert "After reading this page you" in " ".join(first.split()), title


def test_words_of_the_glossary_have_one_meaning_and_are_in_the_code() -> None:
    page = ROOT / "docs" / "glossary.md"
    entries = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| word |"))
    ]
    words = [word for word, *_ in entries]
    assert len(words) == len(set(words))
    code = "\n".join(file.read_text() for file in files() if file.is_relative_to(ROOT / "megatron_zpp"))
    for word, _, where in entries:
        for name in re.findall(r"`([^`]+)`", where):
            if name.startswith("--"):
                known = name in flags()
            elif "/" in name:
                known = (ROOT / "megatron_zpp" / name).exists() or (ROOT / name).exists()
            else:
                known = all(re.search(rf"\b{part}\b", code) for part in name.split("."))
            assert known, f"{word}: {name}"


@cache
def flags() -> frozenset[str]:
    """Flags of every program here, from the fields of its options or as its code spells them."""
    code = "\n".join(file.read_text() for file in files() if file.suffix != ".md" and file != Path(__file__))
    fields = re.findall(
        r"^    (\w+): [^=]*= (?:option|switch|optional|count|key)\(", code, flags=re.MULTILINE
    )
    spelled = re.findall(r"--[a-zA-Z][\w-]*", code)
    return frozenset({f"--{name.replace('_', '-')}" for name in fields} | set(spelled) | FOREIGN)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_flags_on_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-zA-Z](?:[\w-]*[a-zA-Z0-9])?(?!-?[…\w])", page.read_text()))
    assert sorted(name for name in named - flags() if reason_of(name) is None) == []
