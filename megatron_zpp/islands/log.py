"""The hub's directory: a log of outer steps, with the frames that ranks of islands sent, and their layouts.

    settings.json                       names of the islands, and what settings the first one brought
    layouts/DIGEST.json                 a layout by its SHA-256
    step_00000012/ISLAND.RANK.frames    a line of JSON (`Contribution`), then the frames
    step_00000012/closed.json           written last: the members, and the layouts of their ranks

A step is closed when it has closed.json. One step is open: the one after the newest closed step.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_zpp.config.options import option_error
from megatron_zpp.islands.messages import HubRefused
from megatron_zpp.storage.files import check_writable, fsync, open_shared, replacing, write_text, write_whole

_STEP = re.compile(r"step_(\d{8,})")
_FRAMES = re.compile(r"([\w-]+)\.(\d+)\.frames")


@dataclass(frozen=True)
class Contribution:
    """What one rank sent to a step: the header of its file. `start` is one text per start of an island."""

    start: str
    ranks: int
    layout: str  # its digest
    sizes: Sequence[int]  # bytes of each frame
    consumed: int  # samples that the island has read
    weights: int  # a checksum of its outer weights


class OuterLog:
    """The log in a directory, of which this process is the only writer. Not thread-safe, but for frames.

    `open_step` is None until anything is contributed. `newest`, and `first` of those kept, are None until one
    is closed.
    """

    def __init__(self, directory: Path, names: Sequence[str], keep: int) -> None:
        self._directory, self._names, self._keep = directory, names, keep
        check_writable("--directory", str(directory))
        (directory / "layouts").mkdir(parents=True, exist_ok=True)
        self._lock = open_shared(directory / "hub.lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise option_error("--directory", directory, "another hub uses it; give another one") from None
        self._read_settings()
        steps = {int(found[1]): path for path in directory.iterdir() if (found := _STEP.fullmatch(path.name))}
        closed = sorted(step for step in steps if (steps[step] / "closed.json").exists())[-keep:]
        self.newest = self.first = max(closed, default=None)
        while self.first is not None and self.first - 1 in closed:
            self.first -= 1
        self.open_step = max(steps, default=None) if self.newest is None else self.newest + 1
        for step, path in steps.items():
            if self.first is not None and step < self.first:  # or a hub was killed as it removed the step
                (path / "closed.json").unlink(missing_ok=True)
                shutil.rmtree(path)
        self.held: dict[str, dict[int, Contribution]] = {name: {} for name in names}
        if self.open_step is not None:
            self._read_open(self._path(self.open_step))
        self._remove_layouts()

    def _read_settings(self) -> None:
        path = self._directory / "settings.json"
        self._settings: dict[str, Any] = {"names": list(self._names)}
        if path.exists():
            self._settings = json.loads(path.read_text())
        if self._settings["names"] != list(self._names):
            names = " ".join(self._settings["names"])
            raise option_error(
                "--names", tuple(self._names), f"the log in --directory has {names}; give these"
            )
        write_text(path, json.dumps(self._settings))

    def _read_open(self, path: Path) -> None:
        """Find the contributions to the open step that are wholly on disk."""
        starts: dict[tuple[str, str], dict[int, Contribution]] = {}
        for file in path.glob("*.frames"):
            if found := _FRAMES.fullmatch(file.name):
                header = _read_header(file)
                starts.setdefault((found[1], header.start), {})[int(found[2])] = header
        for (name, _), ranks in sorted(starts.items(), key=lambda item: _is_whole(item[1])):
            self.held[name] = ranks

    def _remove_layouts(self) -> None:
        """Remove the layouts of removed steps; a rank that connects brings its own."""
        used = {each.layout for ranks in self.held.values() for each in ranks.values()}
        for closed in self._directory.glob("step_*/closed.json"):
            members = json.loads(closed.read_text())["members"].values()
            used |= {digest for member in members for digest in member["layouts"]}
        for path in (self._directory / "layouts").iterdir():
            if path.stem not in used:
                path.unlink()

    def settings_of(
        self, island: str, settings: dict[str, Any], *, lonely: bool
    ) -> tuple[str, dict[str, Any]]:
        """Return the settings of the first island, and its name.

        These become the first without others, or if a `lonely` island brings them before anything else.
        """
        if "island" not in self._settings or (lonely and self.open_step is None):
            self._settings |= {"island": island, "settings": settings}
            write_text(self._directory / "settings.json", json.dumps(self._settings))
        return self._settings["island"], self._settings["settings"]

    def has_layout(self, digest: str) -> bool:
        return self._layout(digest).exists()

    def layout(self, digest: str) -> bytes:
        return self._layout(digest).read_bytes()

    def add_layout(self, text: bytes) -> None:
        write_whole(self._layout(hashlib.sha256(text).hexdigest()), text)

    def _layout(self, digest: str) -> Path:
        return self._directory / "layouts" / f"{int(digest, 16):064x}.json"

    def takes(self, step: int, island: str, rank: int, start: str) -> bool:
        """Whether the step is or becomes the open one, and lacks frames of a rank. Raises HubRefused."""
        if self.open_step is None:
            self.open_step = step
        if step > self.open_step:
            raise HubRefused(
                f"outer step {step} cannot begin: the hub's open one is {self.open_step}; start the hub on "
                "the --directory that it had, or load a checkpoint from before that step"
            )
        self.check_kept(step)
        held = self.held[island]
        mine = held.get(rank)
        return step == self.open_step and not _is_whole(held) and (mine is None or mine.start != start)

    def check_kept(self, step: int) -> None:
        """Raise HubRefused if a step was closed too long ago, or before this log began."""
        first = self.open_step if self.first is None else self.first
        if first is not None and step < first:
            raise HubRefused(
                f"the hub keeps outer steps from {first} on, and {step} is needed: load the checkpoint of "
                "another island, or raise --keep"
            )

    def write(
        self, step: int, island: str, rank: int, header: Contribution, fill: Callable[[BinaryIO], None]
    ) -> None:
        """Write the file of a rank, whose frames `fill` appends. May run beside any other call."""
        path = self._path(step)
        if not path.exists():
            path.mkdir(exist_ok=True)
            fsync(self._directory)
        with replacing(path / f"{island}.{rank}.frames") as file:
            file.write(json.dumps(dataclasses.asdict(header)).encode() + b"\n")
            fill(file)

    def add(self, step: int, island: str, rank: int, header: Contribution) -> None:
        """Note what `write` wrote, unless the step was closed meanwhile."""
        if step == self.open_step:
            if any(other.start != header.start for other in islice(self.held[island].values(), 1)):
                self.held[island] = {}  # the island was started again
            self.held[island][rank] = header

    def whole(self) -> list[str]:
        """The islands all of whose ranks are in the open step."""
        return [name for name in self._names if _is_whole(self.held[name])]

    def close(self) -> int:
        """Close the open step with the islands that are whole; return the bytes of their frames."""
        assert self.open_step is not None, "something was contributed"
        members = {name: self.held[name] for name in self.whole()}
        record = {
            name: {
                **{key: getattr(ranks[0], key) for key in ("start", "consumed", "weights")},
                "layouts": [ranks[rank].layout for rank in range(len(ranks))],
            }
            for name, ranks in members.items()
        }
        write_text(self._path(self.open_step) / "closed.json", json.dumps({"members": record}))
        self.newest, self.open_step = self.open_step, self.open_step + 1
        self.held = {name: {} for name in self._names}
        self.first = self.newest if self.first is None else self.first
        for step in range(self.first, self.newest - self._keep + 1):
            self.first = step + 1
            (self._path(step) / "closed.json").unlink()
            shutil.rmtree(self._path(step))
        return sum(sum(header.sizes) for ranks in members.values() for header in ranks.values())

    def members(self, step: int) -> dict[str, Any]:
        """The members of a closed step, in the order of the names. Raises HubRefused."""
        self.check_kept(step)
        if self.newest is None or step > self.newest:
            raise HubRefused(f"outer step {step} is not closed yet: the newest one is {self.newest}")
        return json.loads((self._path(step) / "closed.json").read_text())["members"]

    @contextlib.contextmanager
    def frames(self, step: int, island: str, rank: int) -> Iterator[tuple[BinaryIO, list[tuple[int, int]]]]:
        """Yield the file of a rank, with offset and size of each frame. May run beside any other call.

        Raises HubRefused if the file was cut short.
        """
        with open(self._path(step) / f"{island}.{rank}.frames", "rb") as file:
            header, size = file.readline(), os.fstat(file.fileno()).st_size
            sizes = json.loads(header)["sizes"] if header.endswith(b"\n") else [1]  # or more
            if size < len(header) + sum(sizes):
                raise HubRefused(
                    f"outer step {step} cannot be taken, because the hub's {file.name} is too short: load "
                    "the checkpoint of an island that has taken it"
                )
            yield file, list(zip(accumulate(sizes, initial=len(header)), sizes, strict=False))

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:08d}"


def _is_whole(held: dict[int, Contribution]) -> bool:
    return bool(held) and len(held) == next(iter(held.values())).ranks


def _read_header(path: Path) -> Contribution:
    with path.open("rb") as file:
        return Contribution(**json.loads(file.readline()))
