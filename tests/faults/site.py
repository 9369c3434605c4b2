"""A directory with one good file of every kind that the programs read, and command lines that work there."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.provenance import provenance_path, write_provenance
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.data.format_by_hand import write_by_hand
from tests.faults.server import Programs

NULL = "--tokenizer-type NullTokenizer --vocab-size 256"
COMMANDS = {
    "pretrain": f"pretrain_gpt.py --data-path text --split 80,10,10 {NULL} --num-layers 2 --hidden-size 16 "
    "--num-attention-heads 2 --seq-length 32 --micro-batch-size 4 --train-iters 2 --lr 1e-3 --log-interval 1 "
    "--eval-iters 1 --num-workers 0 --device cpu",
    "preprocess": f"data/preprocess_data.py --input text.jsonl --output-prefix out {NULL} --workers 1",
    "corpus": "data/build_corpus.py --input text.txt --output out.jsonl",
    "tokenizer": "data/train_tokenizer.py --input text.txt --vocab-size 300 --output-prefix out",
    "huggingface": "megatron_zpp/commands/huggingface.py",
    "sample": "megatron_zpp/commands/sample.py --load checkpoints --max-new-tokens 2",
    "evaluate": "megatron_zpp/commands/evaluate.py --load checkpoints --valid-data text.txt --device cpu",
    "import": "megatron_zpp/commands/import_checkpoint.py",
    "plot": "megatron_zpp/commands/plot.py text.txt",
    "report": "megatron_zpp/commands/report.py text.txt",
}


def make_site(site: Path, programs: Programs) -> None:
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
    done = programs.run(*saving, cwd=site, timeout=240)
    assert done.status == 0, done.stderr
    assert provenance_path("text") in {path.name for path in site.iterdir()}


def of_another_tokenizer(site: Path) -> None:
    """Makes text.* the data of another tokenizer."""
    other = {"tokenizer_type": "NullTokenizer", "vocab_size": 301, "eod": 300, "fingerprint": "0" * 64}
    write_provenance(site / "text", other)


def write_gpt2(
    directory: Path, *, vocabulary: int, positions: int, width: int, heads: int, layers: int
) -> dict[str, tuple[int, ...]]:
    """A GPT-2 as transformers saves one: its config.json, and tensors of ones, whose shapes are returned."""
    of_layer = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    of_layer |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    norms = ["ln_f", *(f"h.{index}.{norm}" for index in range(layers) for norm in ("ln_1", "ln_2"))]
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    for index in range(layers):
        for name, shape in of_layer.items():
            shapes |= {f"h.{index}.{name}.weight": shape, f"h.{index}.{name}.bias": shape[1:]}
    shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
    config = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": positions, "n_embd": width}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | {"n_head": heads, "n_layer": layers}))
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(ones, directory / "model.safetensors", {"format": "pt"})
    return shapes


def train_bpe(site: Path, texts: list[str]) -> None:
    """Writes vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(texts, trainer)
    pipeline.model.save(str(site))
    pipeline.save(str(site / "tokenizer.json"))
