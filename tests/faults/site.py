"""A directory with one good file of every kind that the programs read, and command lines that work there."""

import json
from pathlib import Path

import numpy as np

from benchmarks.faults.foreign_files import train_bpe, write_gpt2
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.provenance import provenance_path, write_provenance
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.data.format_by_hand import write_by_hand
from tests.faults.server import run_program

NULL = "--tokenizer-type NullTokenizer --vocab-size 256"
COMMANDS = {
    "pretrain": f"pretrain_gpt.py --data-path text --split 80,10,10 {NULL} --num-layers 2 --hidden-size 16 "
    "--num-attention-heads 2 --seq-length 32 --micro-batch-size 4 --train-iters 2 --lr 1e-3 --log-interval 1 "
    "--eval-iters 1 --num-workers 0 --device cpu",
    "preprocess": f"data/preprocess_data.py --input text.jsonl --output-prefix out {NULL} --workers 1",
    "corpus": "data/build_corpus.py --input text.txt --output out.jsonl",
    "tokenizer": "data/train_tokenizer.py --input text.txt --vocab-size 300 --output-prefix out",
    "export": "megatron_zpp/__main__.py export",
    "sample": "megatron_zpp/__main__.py sample --load checkpoints --max-new-tokens 2",
    "evaluate": "megatron_zpp/__main__.py evaluate --load checkpoints --valid-data text.txt --device cpu",
    "import": "megatron_zpp/__main__.py import",
    "plot": "megatron_zpp/__main__.py plot text.txt",
    "report": "megatron_zpp/__main__.py report text.txt",
}


def make_site(site: Path) -> None:
    """Fills an empty directory.

    text.*          a data set of bytes, as preprocess_data.py leaves it
    plain.*         another, as Megatron-LM leaves it
    checkpoints/    of iterations 1 and 2 of the command line above
    hf/             a GPT-2 of the same shape in Hugging Face's format, without a tokenizer
    text.jsonl, text.txt, and a tokenizer of each type: t.model, vocab.json with merges.txt, tokenizer.json
    """
    documents = [np.arange(first, first + 100) % 256 for first in range(50)]
    null = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256))
    with IndexedDatasetWriter(site / "text", np.uint16, provenance=describe(null)) as writer:
        for document in documents:
            writer.add_document(document)
    write_by_hand(site / "plain", [document.tolist() for document in documents])
    words = [f"{' '.join(map(str, document))}" for document in documents[:5]]
    (site / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    (site / "text.txt").write_text("\n".join(words * 3))
    (site / "t.model").write_bytes(train_sentencepiece(words * 3, 300, "bpe"))
    train_bpe(site, words)
    write_gpt2(site / "hf", vocabulary=257, positions=32, width=16, heads=2, layers=2)
    (site / "file").write_text("a file\n")
    (site / "directory").mkdir()
    saving = [*COMMANDS["pretrain"].split(), "--save", "checkpoints", "--save-interval", "1"]
    done = run_program(*saving, cwd=site, timeout=240)
    assert done.status == 0, done.stderr
    assert provenance_path("text") in {path.name for path in site.iterdir()}


def of_another_tokenizer(site: Path) -> None:
    """Makes text.* the data of another tokenizer."""
    other = {"tokenizer_type": "NullTokenizer", "vocab_size": 301, "eod": 300, "fingerprint": "0" * 64}
    write_provenance(site / "text", other)
