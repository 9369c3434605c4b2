"""What the tools in data/ and `sample` refuse."""

from functools import partial

from tests.faults.cases import Case, directory, fifo, flip, locked, put
from tests.faults.files import READ_ONLY, WRITABLE

STRICT = "text.jsonl line 1: "
CORRECT = "correct the line, or omit --strict"

preprocess = partial(Case, program="preprocess")
corpus = partial(Case, program="corpus")
tokenizer = partial(Case, program="tokenizer")
sample = partial(Case, program="sample")
importing = partial(Case, program="import")
exporting = partial(Case, program="export")


def strict(said: str, text: bytes | str) -> Case:
    """A line that gives no document."""
    return preprocess("--strict", f"{STRICT}{said} … {CORRECT}", harm=put("text.jsonl", text))


PREPROCESS = [
    preprocess("--input gone.jsonl", "--input gone.jsonl: no such file … check the path"),
    preprocess("--input directory", "--input directory: holds no .txt, .jsonl, .json or .ndjson file"),
    preprocess("--input text.txt", "--input text.txt: is text … data/build_corpus.py --input converts it"),
    preprocess(
        "--input x.parquet",
        "--input x.parquet: is Parquet … of a run reads it",
        harm=put("x.parquet", "PAR1"),
    ),
    preprocess("", "--input text.jsonl: is a FIFO, not a regular file; save", harm=fifo("text.jsonl")),
    preprocess("", "--input text.jsonl: cannot be read; check its permissions", harm=locked("text.jsonl")),
    preprocess("", "--input text.jsonl: has no documents", harm=put("text.jsonl", "\n")),
    strict("malformed line: not JSON", '{"text": "1"'),
    strict("malformed line: not UTF-8", b'{"text": "\xff"}'),
    strict("missing key: no 'text'; its keys: 'body'", '{"body": "1"}'),
    strict("value that is not text: 'text' is a number", '{"text": 5}'),
    strict("document without tokens", '{"text": ""}'),
    strict("document that the tokenizer rejects: 'text': id 300", '{"text": "300"}'),
    *(
        preprocess(
            f"--input text.jsonl z.jsonl.{suffix}",  # an empty file is no compressed one, not even of nothing
            f"z.jsonl.{suffix}: the file ends in the middle of its compressed data; create it again",
            harm=put(f"z.jsonl.{suffix}", ""),
        )
        for suffix in ("gz", "zst")
    ),
    preprocess("", "are required: --input", status=2, without="--input"),
    preprocess("--workers 0", "--workers 0: must be at least 1", status=2),
    preprocess("--json-keys a a", "--json-keys a a: names a key twice", status=2),
    preprocess("--json-keys a/b", "--json-keys a/b: … cannot contain a /", status=2),
    preprocess("--append-eods", "--append-eods; did you mean --append-eod?", status=2),
    preprocess("--output-prefix file/x", f"--output-prefix file: Not a directory; {WRITABLE}"),
    preprocess("--output-prefix ro/x", f"--output-prefix ro: Permission denied; {WRITABLE}", harm=READ_ONLY),
    preprocess(
        "",
        "--output-prefix out_text_document.idx: is a directory; … remove it",
        harm=directory("out_text_document.idx"),
    ),
    preprocess(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model no",
        ": cannot be read … give a SentencePiece .model",
        without="--tokenizer-type --vocab-size",
    ),
]

OTHERS = [
    corpus("", "are required: --output", status=2, without="--output"),
    corpus("--output out.txt", "--output out.txt: must end in .jsonl", status=2),
    corpus("--hf-dataset json", "--hf-dataset: removed; in Python, datasets.load_dataset(", status=2),
    corpus("--output s3://b/c.jsonl", "--output s3://b/c.jsonl: is a URL; give a path of this machine"),
    corpus("--json-key k", "--json-key k: needs --input", status=2, without="--input"),
    corpus("--output ro/o.jsonl", f"--output ro: Permission denied; {WRITABLE}", harm=READ_ONLY),
    corpus("", "--output out.jsonl: is a directory … remove it", harm=directory("out.jsonl")),
    tokenizer("", "are required: --vocab-size", status=2, without="--vocab-size"),
    tokenizer("--vocab-size 10", "--vocab-size 10: bytes and frequent characters alone take 275; give more"),
    tokenizer("--vocab-size 1000000", "--vocab-size 1000000: the text is enough for … pieces at most"),
    tokenizer("", "--input holds no text to train on", harm=put("text.txt", "")),
    tokenizer("--output-prefix file/x", f"--output-prefix file: Not a directory; {WRITABLE}"),
    tokenizer("", "--output-prefix out.model: is a directory … remove it", harm=directory("out.model")),
    sample("--load gone", "--load gone: holds no checkpoint; name"),
    sample("--ckpt-step 9", "--ckpt-step 9: not in checkpoints; iterations there: 1, 2"),
    sample("--temperature -1", "--temperature -1.0: must be at least 0", status=2),
    sample(
        "",
        "--load checkpoints: … damaged between bytes 0 and … --ckpt-step",
        harm=flip("checkpoints/iter_0000002/rank_00000.safetensors", -4),
    ),
]

IDS = "--tokenizer-type NullTokenizer --vocab-size"
HUGGINGFACE = [
    importing("gone new", "SOURCE gone: holds no model of transformers, Megatron-LM or DeepSpeed; name"),
    importing(f"hf new {IDS} 300", "SOURCE hf: has vocab_size 257, but … has 301"),
    importing(f"hf checkpoints {IDS} 256", "CHECKPOINT_DIR checkpoints: exists and is not"),
    importing(f"hf file/x {IDS} 256", f"CHECKPOINT_DIR file: Not a directory; {WRITABLE}"),
    exporting("gone new", "CHECKPOINT_DIR gone: holds no checkpoint; name"),
    exporting("checkpoints hf", "HF_DIR hf: exists and is not an empty directory; name another"),
]

TOOLS = [*PREPROCESS, *OTHERS, *HUGGINGFACE]
