"""The corpus: what files become, and that making it again gives the same digests."""

import hashlib
import json
import random
import zipfile
from pathlib import Path

import pytest

from benchmarks.corpus import collect, packages

LETTERS = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=600)  # no text repeats itself throughout
PROSE = "".join(
    f"the {''.join(LETTERS[at : at + 9])} of a folder is in {''.join(LETTERS[at + 9 : at + 20])}\n"
    for at in range(0, 600, 20)
)


def wheel(folder: Path, name: str, files: dict[str, str]) -> packages.Package:
    """A package in the folder, under the name that `download` gives it."""
    path = folder / "new.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(file), text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(folder / f"{digest[:16]}-{name}.whl")
    return packages.Package("python", name, "1", digest)


def test_the_same_packages_give_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No document is there twice, and none of training is held out."""
    held, other = PROSE.replace("folder", "drawer"), PROSE.replace("folder", "box")
    digests = []
    for run in ("first", "second"):
        folder = tmp_path / run / "packages"
        folder.mkdir(parents=True)
        listed = [
            wheel(folder, "manual", {"a.txt": held}),
            wheel(folder, "one", {"a.txt": PROSE, "b.txt": held + "\n\n", "c.png": PROSE}),
            wheel(folder, "two", {"x.rst": PROSE, "y.md": other}),
        ]
        monkeypatch.setattr(collect, "listed", lambda listed=listed: listed)
        monkeypatch.setattr(collect, "HELD_OUT", {"manual": "a manual"})
        monkeypatch.setattr("sys.argv", ["collect.py", "--output", str(tmp_path / run)])
        collect.main()
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        digests.append([summary[part]["sha256"] for part in ("training", "held_out")])
    assert digests[0] == digests[1]
    lines = (tmp_path / "first/training.jsonl").read_text().splitlines()
    assert sorted((json.loads(line)["source"], json.loads(line)["text"]) for line in lines) == [
        ("one", PROSE),
        ("two", other),
    ]
    assert [json.loads(line)["text"] for line in (tmp_path / "first/held_out.jsonl").open()] == [held]
