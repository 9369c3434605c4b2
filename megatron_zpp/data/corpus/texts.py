"""Reads documents from text files and JSON lines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import JSON_LINES, plain_suffix
from megatron_zpp.data.corpus.inputs import TEXT, Block, find_files, read_blocks
from megatron_zpp.data.corpus.json_lines import MALFORMED, Problem, parse_lines, split_lines, utf16

EMPTY = "empty document"

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Texts:
    """Some texts of one file, none of them empty, and the problems of skipped ones."""

    path: str
    texts: list[str]
    problems: list[Problem]
    disk_bytes: int  # their size in the file


def find_texts(flag: str, patterns: Sequence[str], *, output: str | None = None) -> list[str]:
    """As `find_files`. Raises ValueError also for a name that does not end in a known suffix."""
    files = find_files(flag, patterns, output=output)
    for path in files:
        if plain_suffix(path) not in JSON_LINES + TEXT:
            endings = " or ".join(JSON_LINES + TEXT)
            raise option_error(flag, path, f"its name must end in {endings}, then .gz or .zst if compressed")
    return files


def keep(path: str, numbered: Iterable[tuple[int, str]], problems: list[Problem], disk_bytes: int) -> Texts:
    """Return the texts that are not empty; empty ones become problems. `numbered` has (line, text).

    White space is text, as in `encode`: what one program keeps the next must not skip.
    """
    texts = []
    for line, text in numbered:
        if text:
            texts.append(text)
        else:
            problems.append(Problem(line, EMPTY, "it has no text"))
    problems.sort(key=lambda problem: problem.line)
    return Texts(path, texts, problems, disk_bytes)


def read_documents(path: str, json_key: str, *, parts: bool = False) -> Iterator[Texts]:
    """Yield whole documents: each line of a file of JSON lines, or all of a text file.

    With `parts`, a text file is read in blocks of lines: it may exceed the memory.
    """
    blocks: Iterable[Block] = read_blocks(path, _BLOCK_BYTES)
    of_json = plain_suffix(path) in JSON_LINES
    if not (of_json or parts):
        whole = list(blocks)
        content = b"".join(block.content for block in whole)
        blocks = [Block(content, sum(block.disk_bytes for block in whole))]
    before = 0  # lines
    for block in blocks:
        if of_json:
            lines = split_lines(block.content)
            parsed = list(parse_lines(lines, [json_key], first=before + 1))
            problems = [each for each in parsed if isinstance(each, Problem)]
            numbered = [(each[0], each[1][0]) for each in parsed if not isinstance(each, Problem)]
            yield keep(path, numbered, problems, block.disk_bytes)
            before += len(lines)
        else:
            yield _decode(path, block, before + 1)
            before += block.content.count(b"\n")


def _decode(path: str, block: Block, line: int) -> Texts:
    content = block.content
    try:
        return keep(path, [(line, content.decode().removeprefix("\ufeff"))], [], block.disk_bytes)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        return keep(path, [], [Problem(line, MALFORMED, utf16(content) or "not UTF-8")], block.disk_bytes)
