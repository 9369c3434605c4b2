"""Trains GPT-2's BPE on a corpus, and makes the indexed token files of its parts.

python benchmarks/corpus/make_tokens.py --corpus build/corpus --parts 8

CORPUS is the output of collect.py. Writes CORPUS/tokens/vocab.json and merges.txt, training-00_text_document
and so on, each with an equal share of the documents, and held_out-SOURCE_text_document, by
data/preprocess_data.py. Prints the tokens of each and a digest of all.
"""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

from benchmarks.common import ROOT, program_parser

EOD = "<|endoftext|>"


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--entries", type=int, default=32768, help="of the vocabulary")
    parser.add_argument("--train-mib", type=int, default=192, help="text that the merges are learned from")
    parser.add_argument("--parts", type=int, default=8, help="of the training tokens")
    options = parser.parse_args()
    folder = options.corpus / "tokens"
    folder.mkdir(exist_ok=True)
    if not (folder / "merges.txt").exists():
        train_bpe(options.corpus / "training.jsonl", options.entries, options.train_mib << 20, folder)
    whole = hashlib.sha256()
    for name in ("vocab.json", "merges.txt"):
        whole.update((folder / name).read_bytes())
    for name, lines in itertools.chain(
        parts(options.corpus / "training.jsonl", options.parts), sources(options.corpus / "held_out.jsonl")
    ):
        tokens = folder / f"{name}_text_document.bin"
        if not tokens.with_suffix(".idx").exists():
            preprocess(name, lines, folder)
        whole.update(tokens.read_bytes())
        print(f"{name}: {tokens.stat().st_size // 2:,} tokens", flush=True)
    print(f"SHA-256 of the tokenizer and all tokens: {whole.hexdigest()}")


def train_bpe(corpus: Path, entries: int, size: int, folder: Path) -> None:
    """Learn GPT-2's byte-level BPE from documents spread over the corpus, about `size` bytes of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    every = max(1, round(corpus.stat().st_size / size))
    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=entries - 1,  # and the end of document
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with corpus.open() as file:
        pipeline.train_from_iterator(
            (json.loads(line)["text"] for line in itertools.islice(file, 0, None, every)), trainer
        )
    pipeline.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary[EOD] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))


def parts(corpus: Path, count: int) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, lines) of each part: lines of about equal size in the order of the corpus."""
    limit, size = corpus.stat().st_size / count, 0
    with corpus.open() as file:
        for number, group in itertools.groupby(
            ((line, min(count - 1, int((size := size + len(line.encode())) / limit))) for line in file),
            key=lambda pair: pair[1],
        ):
            yield f"training-{number:02}", (line for line, _ in group)


def sources(corpus: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, lines) of each held-out source."""
    lines = sorted(((json.loads(line)["source"], line) for line in corpus.open()), key=lambda pair: pair[0])
    for source, group in itertools.groupby(lines, key=lambda pair: pair[0]):
        yield f"held_out-{source}", (line for _, line in group)


def preprocess(name: str, lines: Iterator[str], folder: Path) -> None:
    """Tokenise JSON lines with an end of document behind each."""
    text = folder / f"{name}.jsonl"
    with text.open("w") as file:
        file.writelines(lines)
    command = [sys.executable, str(ROOT / "data/preprocess_data.py"), "--input", str(text)]
    command += ["--output-prefix", str(folder / name), "--tokenizer-type", "GPT2BPETokenizer"]
    command += ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    subprocess.run([*command, "--append-eod"], check=True, stdout=subprocess.DEVNULL)
    text.unlink()


if __name__ == "__main__":
    main()
