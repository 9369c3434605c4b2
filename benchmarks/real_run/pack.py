"""Packs tokens for a machine that gets them as files.

python benchmarks/real_run/pack.py --tokens DIR --output DIR

common.tar.xz has the tokenizer and the held-out tokens, training-00.tar.xz and so on a part of the training
tokens each. LZMA with the settings for 16-bit values makes them smallest. run.py --archives unpacks them.
"""

import argparse
import lzma
import tarfile
from pathlib import Path

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 27}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", type=int, help="training parts to pack; default all")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    common = [
        options.tokens / "vocab.json",
        options.tokens / "merges.txt",
        *options.tokens.glob("held_out-*"),
    ]
    pack(options.output / "common.tar.xz", common)
    names = sorted({path.name.split("_")[0] for path in options.tokens.glob("training-*_text_document.idx")})
    for name in names[: options.parts]:
        pack(options.output / f"{name}.tar.xz", list(options.tokens.glob(f"{name}_text_document*")))


def pack(target: Path, files: list[Path]) -> None:
    """Write the files to an archive, unless it is there."""
    if target.exists():
        return
    partial = target.with_suffix(".partial")
    with (
        lzma.open(partial, "wb", filters=FILTERS) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        for path in sorted(files):
            if path.is_file():
                archive.add(path, path.name)
    partial.rename(target)
    print(f"{target.name}: {target.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
