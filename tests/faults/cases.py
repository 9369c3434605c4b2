"""What a case of a bad input is: a command line, what is done to the files before it, what it must say."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.site import COMMANDS
from tests.support import flipped

Harm = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A good command line with `argv` at its end and without the flags, and their values, in `without`.

    The one line on stderr holds `said`, in parts that ` … ` separates and in their order; the last flag of
    `argv` is before it if it starts with a colon or " (given)". `harm` is done to a copy of the site (see
    site.py) before.
    """

    argv: str
    said: str
    status: int = 1
    harm: Harm | None = None
    without: str = ""
    env: dict[str, str] = field(default_factory=dict)
    program: str = "pretrain"

    @property
    def words(self) -> str:
        """The whole of `said`."""
        flag = f"--{self.argv.rpartition('--')[2]}" if self.said.startswith((": ", " (given)")) else ""
        return flag + self.said

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.program}: {self.words}"

    @property
    def command(self) -> list[str]:
        """The whole command line."""
        command = COMMANDS[self.program].split()
        for flag in self.without.split():
            start = command.index(flag)
            stop = start + 1
            while stop < len(command) and not command[stop].startswith("--"):
                stop += 1
            del command[start:stop]
        return [*command, *self.argv.split()]


def refused(argv: str, said: str, **more: object) -> Case:
    """A command line of pretrain_gpt.py that cannot be right."""
    return Case(argv, said, status=2, **more)


def cut(name: str, length: int) -> Harm:
    """Shortens a file; a negative length takes that many bytes off its end."""
    return lambda site: (site / name).write_bytes((site / name).read_bytes()[:length])


def flip(name: str, at: int) -> Harm:
    """Flips the lowest bit of a byte; a negative place is counted from the end."""
    return lambda site: (site / name).write_bytes(flipped((site / name).read_bytes(), 8 * at))


def put(name: str, content: bytes | str) -> Harm:
    """Makes a file, or replaces it."""
    data = content.encode() if isinstance(content, str) else content
    return lambda site: (site / name).write_bytes(data)


def remove(name: str) -> Harm:
    """Removes a file."""
    return lambda site: (site / name).unlink()


def _in_place_of(name: str, make: Callable[[Path], object]) -> Harm:
    """Makes something where a file was."""

    def harm(site: Path) -> None:
        (site / name).unlink(missing_ok=True)
        make(site / name)

    return harm


def directory(name: str) -> Harm:
    """Puts a directory where a file was."""
    return _in_place_of(name, Path.mkdir)


def fifo(name: str) -> Harm:
    """Puts a FIFO, which nobody writes to, where a file was."""
    return _in_place_of(name, os.mkfifo)


def link(name: str, target: str) -> Harm:
    """Puts a symbolic link where a file was."""
    return _in_place_of(name, lambda path: path.symlink_to(target))


def loop(name: str) -> Harm:
    """Puts a symbolic link to itself where a file was."""
    return link(name, name)


def locked(name: str, mode: int = 0) -> Harm:
    """Takes permissions away."""
    return lambda site: (site / name).chmod(mode)


def both(*harms: Harm) -> Harm:
    """One after the other."""

    def harm(site: Path) -> None:
        for one in harms:
            one(site)

    return harm
