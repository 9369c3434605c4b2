"""Reads documents from text files and JSON lines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import JSON_LINES, plain_suffix
from megatron_zpp.data.corpus.inputs import TEXT, read_blocks
from megatron_zpp.data.corpus.json_lines import MALFORMED, parse_lines, split_lines, utf16
from megatron_zpp.data.corpus.problems import Problem, Problems

EMPTY = "empty document"

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Texts:
    """Some texts of one file, none of them empty, and the problems of skipped ones."""

    path: str
    texts: list[str]
    problems: Problems
    disk_bytes: int  # their size in the file


def check_suffix(flag: str, path: str) -> None:
    """Raise ValueError if the name does not end in a known suffix."""
    if plain_suffix(path) not in JSON_LINES + TEXT:
        endings = " or ".join(JSON_LINES + TEXT)
        raise option_error(flag, path, f"its name must end in {endings}, then .gz or .zst if compressed")


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
    return Texts(path, texts, Problems.of(problems), disk_bytes)


def read_documents(path: str, json_key: str) -> Iterator[Texts]:
    """Yield whole documents: each line of a file of JSON lines, or all of a text file."""
    if plain_suffix(path) in JSON_LINES:
        yield from _read_json_lines(path, json_key)
        return
    blocks = list(read_blocks(path, _BLOCK_BYTES))
    content = b"".join(block.content for block in blocks)
    yield _decode(path, content, line=1, disk_bytes=sum(block.disk_bytes for block in blocks))


def read_passages(path: str, json_key: str) -> Iterator[Texts]:
    """Like `read_documents`, but in blocks of lines for a text file, which may exceed the memory."""
    if plain_suffix(path) in JSON_LINES:
        yield from _read_json_lines(path, json_key)
        return
    line = 1
    for block in read_blocks(path, _BLOCK_BYTES):
        yield _decode(path, block.content, line, block.disk_bytes)
        line += block.content.count(b"\n")


def _read_json_lines(path: str, json_key: str) -> Iterator[Texts]:
    before = 0
    for block in read_blocks(path, _BLOCK_BYTES):
        lines = split_lines(block.content)
        numbered, problems = [], []
        for parsed in parse_lines(lines, [json_key]):
            if isinstance(parsed, Problem):
                problems.append(Problem(before + parsed.line, parsed.kind, parsed.detail))
            else:
                numbered.append((before + parsed[0], parsed[1][0]))
        yield keep(path, numbered, problems, block.disk_bytes)
        before += len(lines)


def _decode(path: str, content: bytes, line: int, disk_bytes: int) -> Texts:
    try:
        return keep(path, [(line, content.decode().removeprefix("\ufeff"))], [], disk_bytes)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        return keep(path, [], [Problem(line, MALFORMED, utf16(content) or "not UTF-8")], disk_bytes)
