"""Blocks of commands on pages: what class each is of, and the command lines of our programs in it.

A line above a block says its class, which a reader on GitHub does not see:

    <!-- executed -->                 tests/docs/test_commands.py runs it, at night
    <!-- executed by FILE and FILE --> these files run it
    <!-- needs a cluster -->          it cannot run here; the site shows these words above the block
    (no such line)                    every line is a command of ours, which is parsed
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from docs.site.reference import FILES
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- (executed|needs)([^\n]*) -->\n)?```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^(megatron-zpp|python|torchrun|\./|launch/|sbatch|srun|pip|curl|git|hf|--|[A-Z_]+=\S+ )", re.MULTILINE
)
ELLIPSES = {"…", "..."}


@dataclass(frozen=True)
class Block:
    """A block of commands; `kind` is executed, needs or parsed; `words` is the rest of the line above."""

    page: Path
    line: int
    kind: str
    words: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command line of one of our commands or files; not `whole` if parts are omitted (…) or named ($)."""

    program: str
    arguments: tuple[str, ...]
    whole: bool


def blocks() -> list[Block]:
    """Every block of commands, in the order of pages, also one without a language."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            kind, words, language, block = match.groups()
            if language == "bash" or (language == "" and COMMAND.search(block)):
                line = text[: match.start(4)].count("\n") + 1
                found.append(Block(page, line, kind or "parsed", (words or "").strip(), block))
    return found


def lines(block: Block) -> list[str]:
    """The command lines of a block, without comments, with continued lines joined."""
    if block.text.startswith("--"):  # flags alone
        return ["python pretrain_gpt.py " + block.text.replace("\n", " ") + " …"]
    joined = block.text.replace("\\\n", " ").splitlines()
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def command(line: str) -> Command | None:
    """The command of ours in a line, behind a launcher or not; None if there is none."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # part of a longer construction of the shell
        return None
    words = [word for word in words if word != "&"]
    whole = not ELLIPSES & set(words) and "$" not in line
    words = [word for word in words if word not in ELLIPSES]
    for number, word in enumerate(words):
        rest = words[number + 1 :]
        if word == "megatron-zpp" or (word == "megatron_zpp" and words[number - 1] == "-m"):
            return Command(rest[0], tuple(rest[1:]), whole) if rest else None
        if word.endswith(".py") and (ROOT / word).is_file():
            return Command(FILES.get(word, word), tuple(rest), whole)
        if word.endswith("/sweep.sbatch"):
            return Command("train", tuple(rest[2:]), False)
        if word.endswith(".sbatch"):
            return Command("train", tuple(rest), whole)
    return None
