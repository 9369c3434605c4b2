"""Packs tokens for a machine that gets them as files: archives of at most --mib each.

python benchmarks/real_run/pack.py --tokens DIR --output DIR

common.tar.xz has the tokenizer and the held-out tokens, training-00.tar.xz and so on a part of the training
tokens each. LZMA with the settings for 16-bit values makes them smallest. run.py --archives unpacks them.
"""

import argparse
import lzma
import sys
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
    parser.add_argument(
        "--mib", type=int, default=55, help="limit of a training part and common.tar.xz together"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    common = [
        options.tokens / "vocab.json",
        options.tokens / "merges.txt",
        *options.tokens.glob("held_out-*"),
    ]
    limit = (options.mib << 20) - pack(options.output / "common.tar.xz", common)
    names = sorted({path.name.split("_")[0] for path in options.tokens.glob("training-*_text_document.idx")})
    for name in names[: options.parts]:
        size = pack(options.output / f"{name}.tar.xz", list(options.tokens.glob(f"{name}_text_document*")))
        if size > limit:
            sys.exit(f"pack.py: {name} takes {size >> 20} MiB; make more parts (make_tokens.py --parts)")


def pack(target: Path, files: list[Path]) -> int:
    """Write the files to an archive; return its size."""
    with (
        lzma.open(target, "wb", filters=FILTERS) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        for path in sorted(files):
            if path.is_file():
                archive.add(path, path.name)
    size = target.stat().st_size
    print(f"{target.name}: {size / 2**20:.1f} MiB", flush=True)
    return size


if __name__ == "__main__":
    main()
