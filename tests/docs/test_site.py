"""The site's pages: parts of the README, links, navigation, and pages of flags. launch/docs.sh builds it."""

import dataclasses
import re
import typing

import pytest

from docs.site import deepspeed_tables, pages, reference
from megatron_zpp import commands
from megatron_zpp.config.legacy.deepspeed_keys import KEYS
from megatron_zpp.config.legacy.old_flags import OLD_FLAGS
from megatron_zpp.config.legacy.reasons import BY_NAME
from megatron_zpp.config.options import Options, flag_of, option
from megatron_zpp.config.root import Config
from tests.support import ROOT


def test_the_readme_is_whole_in_the_site() -> None:
    text = pages.start_page()
    titles = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    omitted = [title for title in titles if f"## {title}\n" not in text]
    assert omitted == [pages.ELSEWHERE]


@pytest.mark.parametrize(
    ("site", "text", "there"),
    [
        ("guide/data.md", "[a](zero.md#which)", "[a](zero.md#which)"),
        ("guide/data.md", "[a](../../README.md#your-own-text)", "[a](../start.md#your-own-text)"),
        ("guide/data.md", "[a](../../benchmarks/README.md)", "[a](../internals/benchmarks.md)"),
        ("guide/data.md", "[a](../../pyproject.toml)", "[a](../files/pyproject.toml)"),
        ("guide/data.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("guide/data.md", "[a](#below)", "[a](#below)"),
        ("start.md", "![a](docs/images/quickstart_loss.png)", "![a](images/quickstart_loss.png)"),
        ("internals/benchmarks.md", "[a](../docs/guide/zero.md)", "[a](../guide/zero.md)"),
        (
            "internals/benchmarks.md",
            "[a](results/real_run.json)",
            "[a](../files/benchmarks/results/real_run.json)",
        ),
        ("guide/zero.md", "```\n[a](../../README.md)\n```", "```\n[a](../../README.md)\n```"),
        ("guide/zero.md", r"| `A\|B` | b |", "| `A|B` | b |"),
        ("guide/zero.md", "<!-- needs 2 GPUs -->\n```bash\nx\n```", '```bash title="needs 2 GPUs"\nx\n```'),
    ],
)
def test_text_of_the_site(site: str, text: str, there: str) -> None:
    assert pages.site_text(text, site) == there


def test_navigation_has_every_page_once() -> None:
    entries = [page for section in pages.navigation(reference.TITLES) for page in section.values()]
    listed = [path for entry in entries for path in ([entry] if isinstance(entry, str) else _paths(entry))]
    assert len(listed) == len(set(listed))
    written = {str(page.relative_to(pages.DOCS)) for page in pages.DOCS.rglob("*.md")}
    made = {pages.START, *pages.SITE_PATHS.values(), *reference.TITLES}
    assert set(listed) == written | made


def _paths(section: object) -> list[str]:
    return [path for page in section for path in page.values()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Example(Options):
    """example: of every kind"""

    count: int = option(3, "How many.", at_least=1, below=9)
    share: float | None = option(None, "Which_share <of> --count.", above=0)
    mode: typing.Literal["a", "b"] = option("a", "Mode.")
    weights: tuple[float, ...] = option((), "Weights.")
    quiet: bool = option(False, "No output.")
    cache: bool = option(True, "Cache nothing.")
    fuse: bool | None = option(None, "Fuse.")


def test_a_row_says_type_default_bounds_and_help() -> None:
    rows = [re.split(r" \| ", line.strip("| ")) for line in reference.table(_Example).splitlines()[2:]]
    assert [" ".join(row) for row in rows] == [
        "`--count` integer `3` ≥ 1, < 9 How many.",
        r"`--share` number  > 0 Which\_share &lt;of> `--count`.",
        "`--mode` choice `a` `a`, `b` Mode.",
        "`--weights` one or more × number   Weights.",
        "`--quiet` switch off  No output.",
        "`--no-cache` switch off  Cache nothing.",
        "`--fuse` switch, also `--no-…`   Fuse.",
    ]


def test_every_flag_of_a_run_is_on_its_page() -> None:
    page = reference.reference_pages()["reference/pretrain_gpt.md"]
    for cls in typing.get_type_hints(Config).values():
        for field in dataclasses.fields(cls):
            flag = flag_of(field)
            assert page.count(f"| [`{flag}`](#{flag.lstrip('-')})") == 1


def test_every_program_is_on_the_page_of_programs() -> None:
    """A program without a class of options, such as the harness, has the command line of another project."""
    sources = [*(ROOT / "data").glob("*.py"), *(ROOT / commands.__name__.replace(".", "/")).glob("*.py")]
    code = "\n".join(source.read_text() for source in sources)
    defined = set(re.findall(r"^class (\w+)\(Options\)", code, re.MULTILINE))
    assert defined
    assert defined <= {cls.__name__ for classes in reference.PROGRAMS.values() for cls in classes}


def test_every_key_of_deepspeed_and_every_old_flag_is_on_its_page() -> None:
    page = deepspeed_tables.with_tables((pages.DOCS / deepspeed_tables.PAGE).read_text())
    flags = [flag.name for flag in OLD_FLAGS]
    assert [name for name in (*KEYS, *flags, *BY_NAME) if f"`{name}" not in page] == []
    with pytest.raises(ValueError, match="obeyed keys"):
        deepspeed_tables.with_tables("no markers")
