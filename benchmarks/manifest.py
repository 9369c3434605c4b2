"""What the manifest of a large checkpoint costs: rank 0 at the end of a save, and every rank at a load.

    python benchmarks/manifest.py [--ranks 1024] [--file-bytes 2147483648] [--before ROOT]

`--before`: the root of a checkout of format version 5 or older, measured in turns with this one, a process
each. Seconds are CPU seconds of this process, because no file is large enough for a disk to matter:

    reports    rank 0 parses what the ranks have reported of their files
    write      rank 0 writes the manifest and the marker
    read       a rank reads the manifest, and the sidecar of one file
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("MANIFEST_ROOT", str(Path(__file__).resolve().parents[1])))

from megatron_zpp.checkpoint.manifest import FORMAT_VERSION, read_manifest, write_manifest
from megatron_zpp.storage.checksums import CHUNK_BYTES, Checksums


def measure(ranks: int, size: int) -> dict[str, float]:
    """Sizes and CPU seconds of the code that this process has imported."""
    chunks = -(-size // CHUNK_BYTES)
    checksums = Checksums(size, CHUNK_BYTES, tuple(f"{number:064x}" for number in range(chunks)))
    names = [f"rank_{rank:05d}.safetensors" for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        figures: dict[str, float] = {}
        entry: Any = checksums
        parse: Callable[[Any, Path], Any] = Checksums.from_json
        read_one: Callable[[Path, Any], Any] | None = None
        if FORMAT_VERSION > 5:
            from megatron_zpp.storage.sidecar import SidecarDigest, read_sidecar, write_sidecar

            entry, parse = write_sidecar(directory / names[0], checksums), SidecarDigest.from_json
            read_one = read_sidecar
            figures["sidecar_bytes"] = entry.sidecar_bytes
        reports = [json.dumps(entry.to_json()) for _ in names]
        files: dict[str, Any] = {}

        def take_reports() -> None:
            for name, report in zip(names, reports, strict=True):
                files[name] = parse(json.loads(report), directory / name)

        def read() -> None:
            found = read_manifest(directory)
            if read_one is not None:
                read_one(directory / names[0], found[names[0]])

        figures["reports_seconds"] = seconds(take_reports)
        figures["write_seconds"] = seconds(lambda: write_manifest(directory, files))
        figures["read_seconds"] = seconds(read)
        figures["report_bytes"] = len(reports[0])
        figures["manifest_bytes"] = (directory / "manifest.json").stat().st_size
    return {"format_version": FORMAT_VERSION, **figures}


def seconds(action: Callable[[], None]) -> float:
    """CPU seconds of an action."""
    started = time.process_time()
    action()
    return round(time.process_time() - started, 4)


def run_in(root: Path, options: argparse.Namespace) -> dict[str, float]:
    """The figures of the code in `root`, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--ranks",
        str(options.ranks),
        "--file-bytes",
        str(options.file_bytes),
    ]
    child = subprocess.run(
        [*command, "--once"],
        env={**os.environ, "MANIFEST_ROOT": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=root,
    )
    return json.loads(child.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--file-bytes", type=int, default=2 << 30)
    parser.add_argument("--before", type=Path, help="the root of an older checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="measure once and print JSON")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(options.ranks, options.file_bytes)))
        return
    from benchmarks.common import RESULTS, write_result

    roots = {"now": Path(__file__).resolve().parents[1]}
    roots |= {"before": options.before} if options.before else {}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    for _ in range(options.repeats):
        for name, root in roots.items():
            runs[name].append(run_in(root, options))
    rows = {}
    for name, found in runs.items():
        values = {figure: sorted(run[figure] for run in found) for figure in found[0]}
        rows[name] = {figure: [statistics.median(of), of[0], of[-1]] for figure, of in values.items()}
    settings = {"ranks": options.ranks, "file_bytes": options.file_bytes, "repeats": options.repeats}
    figures = {**settings, "each": "median, least, most", **rows}
    write_result("manifest", figures, options.output or RESULTS)


if __name__ == "__main__":
    main()
