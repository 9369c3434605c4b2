"""Collects a corpus of documentation and source code from Debian and Python packages.

python benchmarks/corpus/collect.py --output build/corpus

Downloads the packages of debian.txt and python.txt with apt-get and pip (Debian's need its package lists:
apt-get update), or finds them in OUTPUT/packages; their digests must be those listed. Writes
training.jsonl and held_out.jsonl, a document per line with its source (the package) and its path, without
documents that occur twice, and summary.json. The held-out packages take no part in training, nor do
documents of others that are equal to one of theirs. Running it again gives the same digests.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

from benchmarks.common import program_parser
from benchmarks.corpus.clean import HTML, MIN_CHARACTERS, documents, suffix_of, topic, without_menus
from benchmarks.corpus.packages import Package, download, files_of, listed

HELD_OUT = {  # package: what it is
    "debian-handbook": "a book on administration",
    "postgresql-doc-15": "a manual",
    "manpages-dev": "manual pages",
    "glibc-source": "C and its documentation",
    "networkx": "Python",
}
MAX_TEXT, MAX_HELD_OUT = 64 << 20, 4 << 20  # bytes of text of one package


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder; needs about 5 GB")
    parser.add_argument("--processes", type=int, default=2, help="packages read side by side")
    parser.add_argument("--only", nargs="+", help="packages, to try out changes; default all")
    options = parser.parse_args()
    packages = [package for package in listed() if not options.only or package.name in options.only]
    started = time.perf_counter()
    folder, texts = options.output / "packages", options.output / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    texts.mkdir(exist_ok=True)
    try:
        files = [download(package, folder) for package in packages]
    except ValueError as error:
        sys.exit(f"collect.py: {error}")
    limits = [MAX_HELD_OUT if package.name in HELD_OUT else MAX_TEXT for package in packages]
    # A pool that forks does so from a thread, and its children may wait for locks that another thread held.
    with ProcessPoolExecutor(options.processes, get_context("forkserver"), max_tasks_per_child=1) as pool:
        for said in pool.map(read_package, packages, files, [texts] * len(files), limits):
            print(said, flush=True)
    summary = join(packages, texts, options.output) | {"seconds": round(time.perf_counter() - started)}
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "packages"}, indent=2))


def read_package(package: Package, path: Path, folder: Path, limit: int) -> str:
    """Write cleaned documents of a package as JSON lines, to `limit` bytes; return what was found."""
    files = files_of(path)
    sources = {topic(name) for name, _ in files if suffix_of(name) not in HTML}
    pages: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    size = 0
    for name, data in files:
        if size > limit:
            break
        is_page = suffix_of(name) in HTML
        if is_page and topic(name) in sources:  # the same text twice
            continue
        for text in documents(name, data):
            (pages if is_page else others).append((name, text))
            size += len(text)
    texts = without_menus([text for _, text in pages])
    pages = [
        (name, text) for (name, _), text in zip(pages, texts, strict=True) if len(text) >= MIN_CHARACTERS
    ]
    seen: set[str] = set()
    size = 0
    with (folder / f"{package.name}.jsonl").open("w") as file:
        for name, text in (*pages, *others):
            if text not in seen:
                seen.add(text)
                size += len(text.encode())
                file.write(json.dumps({"text": text, "source": package.name, "path": name}) + "\n")
    return f"{package.name}: {len(seen):,} documents, {size / 1e6:.1f} MB"


def join(packages: Sequence[Package], texts: Path, output: Path) -> dict[str, Any]:
    """Write both parts, in the order of the documents' digests; return what the summary says."""
    seen: set[bytes] = set()
    counts: dict[str, dict[str, int]] = {}
    summary: dict[str, Any] = {}
    held_out = [package for package in packages if package.name in HELD_OUT]
    training = [package for package in packages if package.name not in HELD_OUT]
    for part, members in (("held_out", held_out), ("training", training)):
        places: list[tuple[bytes, str, int, int]] = []
        for package in members:
            counts[package.name] = {"documents": 0, "bytes": 0}
            offset = 0
            with (texts / f"{package.name}.jsonl").open("rb") as file:
                for line in file:
                    text = json.loads(line)["text"].encode()
                    digest = hashlib.sha256(b" ".join(text.split())).digest()
                    if digest not in seen:
                        seen.add(digest)
                        places.append((digest, package.name, offset, len(line)))
                        counts[package.name]["documents"] += 1
                        counts[package.name]["bytes"] += len(text)
                    offset += len(line)
        files = {package.name: (texts / f"{package.name}.jsonl").open("rb") for package in members}
        whole = hashlib.sha256()
        with (output / f"{part}.jsonl").open("wb") as file:
            for _, name, offset, length in sorted(places):
                files[name].seek(offset)
                line = files[name].read(length)
                whole.update(line)
                file.write(line)
        for opened in files.values():
            opened.close()
        size = sum(counts[package.name]["bytes"] for package in members)
        summary[part] = {"documents": len(places), "bytes": size, "sha256": whole.hexdigest()}
    return {**summary, "packages": counts}


if __name__ == "__main__":
    main()
