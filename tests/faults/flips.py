"""Flips bits in every kind of file that is read, cuts files and zeroes parts of them; nothing may be silent.

    python tests/faults/flips.py --flips 1000000 --directory /dev/shm/flips [--output benchmarks/results]

After each change the reader must return what it returned before, or raise one line that names the file or a
flag. Of files that have no digest it must return what an independent reader finds (`flip_targets.py`). The
readers run in processes of their own; one that ends is a failure and is replaced. DIRECTORY/flips.jsonl
has a line for each batch, so that the changes can be continued.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch

from benchmarks.common import save_result
from tests.children import Output, fork
from tests.faults.flip_targets import TARGETS, Target
from tests.faults.tally import GOOD

SECONDS = 5  # of processor time, that a reader may take
BATCH = 1_000  # changes by one process
SECTOR = 512  # bytes
SILENT = "SILENT"


def change(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A change of a file and its name: a bit, a shorter file, or a part that reads as zeros."""
    if not content or (kind := draw.random()) < 0.8:
        at = draw.randrange(8 * max(len(content), 1))
        changed = bytearray(content or b"\0")
        changed[at // 8] ^= 1 << at % 8
        return "bit flip", bytes(changed)
    at = draw.randrange(len(content))
    if kind < 0.9:
        return "cut", content[:at]
    at = at // SECTOR * SECTOR
    zeros = bytes(min(SECTOR, len(content) - at))
    return "zeroed sector", content[:at] + zeros + content[at + len(zeros) :]


def judge(target: Target, first: Any, second: Any) -> tuple[str, str]:
    """What the reader makes of the files as they are, against `first`, and `second` of the other reader."""
    began = time.process_time()
    try:
        value = target.read()
    except (ValueError, OSError) as error:
        line = str(error)
        named = any(str(file.parent) in line or file.name in line for file in target.files) or "--" in line
        clear = named and "\n" not in line and len(line) < 900
        outcome = "found" if clear else "not one clear line", line
    except Exception as error:
        outcome = "another error", repr(error)
    else:
        outcome = _of_value(target, value, first, second)
    if time.process_time() - began > SECONDS:
        return "slow", outcome[1]
    return outcome


def _of_value(target: Target, value: Any, first: Any, second: Any) -> tuple[str, str]:
    same = value == first
    if target.independent is None:
        return ("same bytes", "") if same else (SILENT, repr(value)[:300])
    try:
        other = target.independent()
    except Exception as error:
        return ("same bytes", "") if same else (SILENT, f"the independent reader fails: {error!r:.300}")
    if target.settings:
        return ("as the file says", "") if same == (other == second) else (SILENT, f"{other!r:.600}")
    return ("as the file says", "") if value == other else (SILENT, repr((value, other))[:300])


def batch(make: int, directory: Path, seed: str, flips: int, results: Path) -> None:
    """Some changes of one target, in a process of its own; a line of JSON after each that is not good."""
    target, draw, counts = TARGETS[make][1](directory), random.Random(seed), Counter()
    first = target.read()
    second = target.independent() if target.independent else None
    good = {file: file.read_bytes() for file in target.files}
    began = time.monotonic()
    for number in range(flips):
        file = target.files[number % len(target.files)]
        kind, changed = change(good[file], draw)
        file.write_bytes(changed)
        (directory / "number").write_text(str(number))
        outcome, detail = ("same bytes", "") if changed == good[file] else judge(target, first, second)
        for path, content in good.items():  # readers may repair
            if path == file or path.read_bytes() != content:
                path.write_bytes(content)
        counts[f"{kind}: {outcome}"] += 1
        if outcome not in GOOD:
            _write(
                results,
                {"seed": seed, "number": number, "file": file.name, "outcome": outcome, "said": detail},
            )
    seconds = time.monotonic() - began
    _write(results, {"target": target.name, "seed": seed, "counts": counts, "seconds": seconds})


def _write(results: Path, line: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def flip(
    directory: Path, flips: int, seed: int, *, targets: range, batch_size: int = BATCH
) -> dict[str, Any]:
    """`flips` changes, and a few more, of the targets by number; returns figures."""
    results, log = directory / "flips.jsonl", directory / "flips.log"
    lines = results.read_text().splitlines() if results.exists() else []
    known = {line["seed"] for line in map(json.loads, lines) if "counts" in line}  # of an earlier session
    shares = sum(TARGETS[make][0] for make in targets)
    for make in targets:
        for done in range(0, -(-flips * TARGETS[make][0] // shares), batch_size):
            label = f"{seed}/{make}/{done}"
            if label in known:
                continue
            with tempfile.TemporaryDirectory(dir=directory) as name:
                here = Path(name)

                def run(make=make, here=here, label=label, size=batch_size) -> None:
                    batch(make, here, label, size, results)

                status = os.waitstatus_to_exitcode(os.waitpid(fork(run, Output(log, log)), 0)[1])
                if status:
                    number = (here / "number").read_text() if (here / "number").exists() else "none"
                    ended = {"seed": label, "number": number, "outcome": f"process ended with {status}"}
                    _write(results, ended)
    return figures(results)


def figures(results: Path) -> dict[str, Any]:
    """All changes by target, and those that were not found."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    targets: dict[str, Counter[str]] = {}
    for line in lines:
        if "counts" in line:
            targets.setdefault(line["target"], Counter()).update(line["counts"])
    total = sum((sum(counts.values()) for counts in targets.values()), 0)
    by_outcome: Counter[str] = Counter()
    for counts in targets.values():
        for name, count in counts.items():
            by_outcome[name] += count
    return {
        "changes": total,
        "seconds": round(sum(line.get("seconds", 0) for line in lines)),
        "outcomes": dict(sorted(by_outcome.items())),
        "targets": {name: dict(sorted(counts.items())) for name, counts in targets.items()},
        "failures": [line for line in lines if "counts" not in line],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=int, help="this one alone, by number")
    parser.add_argument(
        "--directory", type=Path, required=True, help="files and flips.jsonl; a tmpfs is quick"
    )
    parser.add_argument("--output", type=Path, help="directory of a result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    targets = range(len(TARGETS)) if options.target is None else range(options.target, options.target + 1)
    options.directory.mkdir(parents=True, exist_ok=True)
    found = {"seed": options.seed} | flip(options.directory, options.flips, options.seed, targets=targets)
    log = (options.directory / "flips.log").read_text() if found["failures"] else ""
    print(json.dumps(found, indent=2), log[-3000:])
    if options.output:
        save_result("flips", found, options.output)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
