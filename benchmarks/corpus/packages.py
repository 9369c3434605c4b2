"""Packages of the corpus: lists with versions and digests, download by pip and apt-get, and their files."""

import hashlib
import heapq
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.corpus.clean import MAX_BYTES, NESTED, is_read

HERE = Path(__file__).parent
DEBIAN, PYTHON = HERE / "debian.txt", HERE / "python.txt"
MAX_RAW = 320 << 20  # bytes of the files that are read of one package


@dataclass(frozen=True, order=True)
class Package:
    """One file of a registry."""

    kind: str  # debian or python
    name: str
    version: str
    digest: str  # SHA-256

    def path(self, folder: Path) -> Path | None:
        """Return the package's file in `folder`, found by its digest's first characters."""
        return next(iter(sorted(folder.glob(f"{self.digest[:16]}-*"))), None)


def listed() -> list[Package]:
    """Return the packages of both lists."""
    packages = []
    for kind, path in (("debian", DEBIAN), ("python", PYTHON)):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                name, version, digest = line.split()
                packages.append(Package(kind, name, version, digest))
    return sorted(packages)


def download(package: Package, folder: Path) -> Path:
    """Return the package's file, downloaded unless it is there. Raises ValueError if it cannot be had."""
    if (found := package.path(folder)) is not None:
        return found
    partial = folder / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    for leftover in partial.iterdir():
        leftover.unlink()
    if package.kind == "debian":
        command = ["apt-get", "download", f"{package.name}={package.version}"]
    else:
        platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.11", "--implementation=cp"]
        command += [*(f"--platform={platform}" for platform in platforms)]
        command += [f"{package.name}=={package.version}"]
    ran = subprocess.run(command, cwd=partial, capture_output=True, text=True)
    files = list(partial.iterdir())
    if ran.returncode or len(files) != 1:
        reason = (ran.stderr.strip().splitlines() or ["no file"])[-1]
        raise ValueError(
            f"{package.name} {package.version}: {command[0]} did not find it ({reason}); mirrors drop "
            f"versions: put an archived copy into {folder} as {package.digest[:16]}-NAME"
        )
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if digest != package.digest:
        raise ValueError(f"{package.name} {package.version}: SHA-256 is {digest}, listed is {package.digest}")
    return files[0].rename(folder / f"{package.digest[:16]}-{files[0].name}")


def files_of(path: Path) -> list[tuple[str, bytes]]:
    """Return (path, contents) of a package's documents, in the order of a digest of their paths.

    Of large packages those with the smallest digests, MAX_RAW bytes of them: a sample that any run repeats.
    """
    heap: list[tuple[int, str, bytes]] = []
    size = 0
    for name, data in _members(path):
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        heapq.heappush(heap, (-key, name, data))
        size += len(data)
        while size > MAX_RAW:
            size -= len(heapq.heappop(heap)[2])
    return [(name, data) for _, name, data in sorted(heap, reverse=True)]


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix != ".deb":
        with path.open("rb") as file:
            yield from _archive(path.name, file, "")
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from _tar(process.stdout, "")


def _archive(name: str, file: IO[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """Yield the documents in a zip file, a wheel or a .tar.xz."""
    if not name.endswith((".zip", ".whl")):
        with lzma.open(file) as unpacked:
            yield from _tar(unpacked, where)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if is_read(f"/{entry.filename}") and entry.file_size <= MAX_BYTES:
                yield f"{where}/{entry.filename}", archive.read(entry)


def _tar(file: IO[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for entry in archive:
            name = f"{where}/{entry.name.removeprefix('./')}"
            if not entry.isfile():
                continue
            if name.endswith(NESTED):
                contents = archive.extractfile(entry)
                assert contents is not None
                nested = io.BytesIO(contents.read()) if name.endswith(".zip") else contents
                yield from _archive(name, nested, name)
            elif is_read(name) and (entry.size <= MAX_BYTES or name.endswith(".dict.dz")):
                contents = archive.extractfile(entry)
                assert contents is not None
                yield name, contents.read()
