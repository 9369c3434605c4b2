"""Turns the repository's pages into pages of the site: parts of the README, links between them, navigation.

Works on text alone, so that tests need no site generator. Paths are relative to the repository's root, or,
where a name says site, to the root of the site.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
START = "start.md"  # the README in the site, but for this section, which docs/index.md says as well
ELSEWHERE = "Where to read on"
# Pages outside docs/: the benchmarks', and those beside the README.
SITE_PATHS = {"benchmarks/README.md": "internals/benchmarks.md"} | {
    page.name: f"internals/{page.stem.lower()}.md"
    for page in sorted(ROOT.glob("*.md"))
    if page.name != "README.md"
}
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def start_page() -> str:
    """Return the README as a page of the site."""
    sections = _sections((ROOT / "README.md").read_text())
    return "\n".join(["# Start here\n", *(sections[title] for title in sections if title != ELSEWHERE)])


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path == "README.md":
        return START
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return SITE_PATHS.get(path, f"files/{path}")


def source_path(site: str) -> str:
    """Return the file of the repository from which a page of the site is made."""
    if site == START:
        return "README.md"
    return next((source for source, path in SITE_PATHS.items() if path == site), f"docs/{site}")


def site_text(text: str, site: str) -> str:
    """Return a page's markdown as the site needs it: links, needs of commands, and `|` in code of tables."""
    folder, own = os.path.dirname(source_path(site)), os.path.dirname(site)

    def relink(match: re.Match[str]) -> str:
        link = match.group(1)
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not path:
            return match.group(0)
        there = os.path.relpath(site_path(os.path.normpath(os.path.join(folder, path))), own or ".")
        return f"]({there}{'#' + anchor if anchor else ''})"

    pieces = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    prose = [_code_of_tables(LINK.sub(relink, piece)) for piece in pieces[::2]]
    text = "".join(part for pair in zip(prose, [*pieces[1::2], ""], strict=True) for part in pair)
    return re.sub(r"^<!-- needs (.*) -->\n```bash$", r'```bash title="needs \1"', text, flags=re.MULTILINE)


def linked_files() -> list[str]:
    """Return the files outside docs/ that pages link to and that are not pages themselves."""
    found = set()
    for page in [ROOT / "README.md", *(ROOT / source for source in SITE_PATHS), *DOCS.rglob("*.md")]:
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            path = os.path.normpath(page.parent / link.partition("#")[0])
            target = os.path.relpath(path, ROOT)
            if not re.match(r"[a-z]+:", link) and not target.startswith("docs/") and os.path.isfile(path):
                found.add(target)
    return sorted(found - {"README.md", *SITE_PATHS})


def navigation(reference: dict[str, str]) -> list[dict[str, object]]:
    """Return the navigation: the pages of docs/index.md, in its sections and order, and those of flags.

    A page is called as its first heading says, up to a colon.
    """
    nav: list[dict[str, object]] = [{"Home": "index.md"}]
    for title, section in _sections((DOCS / "index.md").read_text()).items():
        entries = [{name: path} for path, name in reference.items()] if title == "Reference" else []
        links = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", section, flags=re.MULTILINE)
        sources = [os.path.normpath(f"docs/{link}") for link in links]
        if title == "Internals":
            sources += [source for source in SITE_PATHS if source not in sources]
        for source in sources:
            first = (ROOT / source).read_text().partition("\n")[0].removeprefix("# ").partition(":")[0]
            path = site_path(source)
            entries.append({"Start here" if path == START else first: path})
        if entries:
            nav.append({title: entries})
    return nav


def _sections(text: str) -> dict[str, str]:
    """Return the sections of the second level with their headings, by title; what precedes them under ""."""
    blocks = FENCE.findall(text)
    hidden = FENCE.sub("\0", text)  # a comment in a block of commands is no heading
    parts = re.split(r"^(?=## )", hidden, flags=re.MULTILINE)
    found = {"": parts[0].partition("\n\n")[2]}
    found |= {re.match(r"## (.*)", part).group(1): part for part in parts[1:]}  # type: ignore[union-attr]
    remaining = iter(blocks)
    return {title: re.sub("\0", lambda _: next(remaining), part) for title, part in found.items()}


def _code_of_tables(text: str) -> str:
    """Replace `\\|` by `|` in code: in tables GitHub needs the backslash, and the site would show it."""
    return re.sub(r"`[^`\n]*`", lambda code: code.group(0).replace(r"\|", "|"), text)
