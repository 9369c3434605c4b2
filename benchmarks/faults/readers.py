"""The readers that are fuzzed: what good files they have, how those are changed, what then reads them."""

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from benchmarks.faults.engines import FLAGS, TOKENIZER, save, small, states, train
from benchmarks.faults.foreign_files import train_bpe, write_gpt2
from benchmarks.faults.mutations import NUMBERS, change_bytes, change_json, changes_of_bytes, changes_of_json
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.root import Config, parse_args, parse_command_line
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.indexed import DTYPE_CODES, HEADER, MAGIC, IndexedDataset, verify_tokens
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.provenance import check_provenance, provenance_path, write_provenance
from megatron_zpp.data.text.shards.text import open_shards
from megatron_zpp.data.windows import WindowDataset
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece

Execute = Callable[[Any], None]
TEXT = "The 1st text, twice: the 1st text.\n\tnaïve 日本 😀<|endoftext|></s>"
OURS = {"tokenizer_type": "NullTokenizer", "vocab_size": 100, "eod": 99, "fingerprint": "f" * 64}


@dataclass(frozen=True)
class Reader:
    """`make(directory)` puts good files there and returns what reads them after a change of `changes`."""

    name: str
    changes: st.SearchStrategy
    make: Callable[[Path], Execute]


def _write_json(path: Path, good: bytes, change: tuple[Any, Any]) -> None:
    """Write a file of JSON after a change of `_either`."""
    raw, inside = change
    path.write_bytes(
        change_json(json.loads(good), inside).encode() if raw is None else change_bytes(good, raw)
    )


def _with_changed_header(file: bytes, changes: list[Any]) -> bytes:
    """A file of safetensors after changes of the values in its header, whose length is right."""
    (length,) = struct.unpack("<Q", file[:8])
    text = change_json(json.loads(file[8 : 8 + length]), changes).encode("utf-8", "replace")
    return struct.pack("<Q", len(text)) + text + file[8 + length :]


def _index(directory: Path) -> Execute:
    """An .idx and its .bin, field by field and byte by byte; whatever opens is read to the end."""
    path = directory / "x"

    def execute(change: tuple[Any, ...]) -> None:
        fields, fitting, changes, after = change
        lengths, documents = [3, 0, 1, 5, 2], [0, 1, 2, 3, 4, 5]
        pointers = (2 * (np.cumsum(lengths) - lengths)).tolist()
        header = {"version": 1, "code": 8, "sequences": len(lengths), "documents": len(documents)}
        for where, place, value in fields:
            array = {"lengths": lengths, "pointers": pointers, "indices": documents}.get(where)
            if array is None:
                header[where] = value
            else:
                array[place % len(array)] = value
        size = 2
        if fitting and header["code"] in DTYPE_CODES:  # so that what lies behind the first check is reached
            size = np.dtype(DTYPE_CODES[header["code"]]).itemsize
            pointers = [int(at) for at in (np.cumsum(np.array(lengths, object)) - lengths) * size]
        index = HEADER.pack(MAGIC, *(header[name] % limit for name, limit in _HEADER_LIMITS.items()))
        index += b"".join((length % 2**32).to_bytes(4, "little") for length in lengths)
        index += b"".join((number % 2**64).to_bytes(8, "little") for number in [*pointers, *documents])
        Path(f"{path}.idx").write_bytes(change_bytes(index, changes))
        tokens = sum(length for length in lengths if 0 <= length < 1 << 16) * size
        Path(f"{path}.bin").write_bytes(
            change_bytes(bytes(range(min(tokens, 256))) * (tokens // 256 + 1), after)[:tokens]
        )
        data = IndexedDataset(path)
        assert data.num_tokens == data.tokens.size == int(data.lengths[:].astype(np.int64).sum())
        if data.num_tokens > 1:
            WindowDataset(data, 0, data.num_tokens, 1, 2**62, seed=1).batch(np.arange(4))

    return execute


_HEADER_LIMITS = {"version": 2**64, "code": 2**8, "sequences": 2**64, "documents": 2**64}
_FIELD = st.tuples(
    st.sampled_from([*_HEADER_LIMITS, "lengths", "pointers", "indices"]),
    st.integers(0, 5),
    st.one_of(st.sampled_from(NUMBERS), st.integers(0, 12)),
)


def _data_checksums(directory: Path) -> Execute:
    """PREFIX.checksums.json, also with the right digest of itself."""
    prefix = str(directory / "x")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(np.arange(500))
    path = Path(checksums_path(prefix))
    good = path.read_bytes()

    def execute(change: tuple[Any, ...]) -> None:
        raw, inside = change
        if raw is not None:
            path.write_bytes(change_bytes(good, raw))
        else:
            files = change_json(json.loads(good)["files"], inside)
            canonical = files
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                canonical = json.dumps(json.loads(files), sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(canonical.encode("utf-8", "replace")).hexdigest()
            path.write_text(f'{{"files": {files}, "sha256": "{digest}"}}')
        data = IndexedDataset(prefix)
        if data.checksums is not None:
            verify_tokens([data], 0, 1)

    return execute


def _provenance(directory: Path) -> Execute:
    """PREFIX.tokenizer.json."""
    write_provenance(directory / "x", OURS)
    path = Path(provenance_path(str(directory / "x")))
    good = path.read_bytes()

    def execute(change: tuple[Any, ...]) -> None:
        _write_json(path, good, change)
        check_provenance(directory / "x", OURS)

    return execute


def _checkpoint(directory: Path) -> Execute:
    """Every file of a checkpoint, as it is and with right checksums; read into an engine and as a model.

    Without right checksums, what is read must be what was saved.
    """
    from megatron_zpp.checkpoint.load import load_checkpoint
    from megatron_zpp.checkpoint.manifest import MANIFEST, MARKER, write_manifest
    from megatron_zpp.generate.loading import load_model
    from megatron_zpp.storage.checksums import checksums_of
    from megatron_zpp.storage.sidecar import write_sidecar

    engine = small()
    train(engine, seed=1)
    path = Path(str(save(directory, engine, Progress(5, 50), config=parse_args(FLAGS).to_json())))
    saved = states(engine)
    state, shards = path / "state.json", path / "rank_00000.safetensors"
    good = {file: file.read_bytes() for file in path.iterdir()}

    def execute(change: tuple[Any, ...]) -> None:
        target, raw, inside = change
        for file, content in good.items():
            file.write_bytes(content)
        file = path / target.split()[0]
        if target.endswith("header"):
            file.write_bytes(_with_changed_header(good[file], inside))
        elif target.endswith("values"):
            file.write_text(change_json(json.loads(good[file]), inside))
        else:
            file.write_bytes(change_bytes(good[file], raw))
        if "right" in target and file == shards:
            write_manifest(
                path,
                {state.name: checksums_of(state), shards.name: write_sidecar(shards, checksums_of(shards))},
            )
        elif "right" in target:
            digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
            (path / MARKER).write_text(digest + "\n")
        load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
        assert "right" in target or states(engine) == saved, "other states were loaded"
        load_model(str(directory), None)

    return execute


_TARGETS = (
    *(f"{name} bytes" for name in ("COMMITTED", "manifest.json", "state.json", "rank_00000.safetensors")),
    *("manifest.json right values", "manifest.json right bytes"),
    *("rank_00000.safetensors right bytes", "rank_00000.safetensors right header"),
    "rank_00000.safetensors.sha256 bytes",
)


def _try(config: TokenizerConfig) -> None:
    tokenizer = build_tokenizer(config)
    ids = tokenizer.encode_batch([TEXT])[0]
    assert all(0 <= index < tokenizer.vocab_size for index in (*ids, tokenizer.eod))
    tokenizer.decode(ids)
    assert tokenizer.fingerprint


def _sentencepiece(model_type: Literal["bpe", "unigram"]) -> Callable[[Path], Execute]:
    def make(directory: Path) -> Execute:
        good = train_sentencepiece([TEXT * 9], 293, model_type)
        path = directory / "t.model"
        config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))

        def execute(changes: list[Any]) -> None:
            path.write_bytes(change_bytes(good, changes))
            _try(config)

        return execute

    return make


def _tokenizer_of_files(config: TokenizerConfig, *paths: Path) -> Execute:
    """A tokenizer after a change of one of its files: of its bytes, or of its values of JSON."""
    good = {path.name: path.read_bytes() for path in paths}

    def execute(change: tuple[Any, ...]) -> None:
        target, raw, inside = change
        name, kind = target.split()
        changed = change_bytes(good[name], raw)
        if kind == "values":
            changed = change_json(json.loads(good[name]), inside).encode()
        for path in paths:
            path.write_bytes(changed if path.name == name else good[path.name])
        _try(config)

    return execute


def _gpt2(directory: Path) -> Execute:
    """vocab.json and merges.txt."""
    train_bpe(directory, [TEXT])
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    return _tokenizer_of_files(config, vocab, merges)


def _hugging_face(directory: Path) -> Execute:
    """tokenizer.json, and the tokenizer_config.json beside it."""
    train_bpe(directory, [TEXT])
    path, beside = directory / "tokenizer.json", directory / "tokenizer_config.json"
    beside.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "lstrip": False}}))
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    return _tokenizer_of_files(config, path, beside)


def _hugging_face_model(directory: Path) -> Execute:
    """config.json, the index, and the header of the weights, of a GPT-2; read as a run with flags does."""
    from megatron_zpp.checkpoint.huggingface.importing import open_weights

    shapes = write_gpt2(directory / "hf", vocabulary=50, positions=8, width=32, heads=4, layers=2)
    config, weights = directory / "hf/config.json", directory / "hf/model.safetensors"
    good = {path: path.read_bytes() for path in (config, weights)}
    index = {"metadata": {}, "weight_map": dict.fromkeys(shapes, "a.safetensors")}
    model = parse_args(FLAGS).model

    def execute(change: tuple[Any, ...]) -> None:
        target, raw, inside = change
        for path in (directory / "hf").iterdir():
            path.unlink()
        for path, content in good.items():
            path.write_bytes(content)
        if target == "config":
            config.write_text(change_json(json.loads(good[config]), inside))
        elif target == "index":
            weights.rename(directory / "hf/a.safetensors")
            (directory / "hf/model.safetensors.index.json").write_text(change_json(index, inside))
        elif target == "header":
            weights.write_bytes(_with_changed_header(good[weights], inside))
        else:
            path = config if target == "config bytes" else weights
            path.write_bytes(change_bytes(good[path], raw))
        with open_weights(str(directory / "hf"), model, OURS | {"vocab_size": 50}) as opened:
            opened.parameters()

    return execute


def _parquet(directory: Path) -> Execute:
    """Text in Parquet: pages with checksums, and the index behind them."""
    import pyarrow
    import pyarrow.parquet

    path = directory / "text.parquet"
    table = pyarrow.table({"text": [f"{number} {number + 1}" for number in range(60)]})
    pyarrow.parquet.write_table(table, path, row_group_size=25, write_page_checksum=True)
    good = path.read_bytes()
    index = len(good) - 8 - int.from_bytes(good[-8:-4], "little")

    def execute(change: tuple[Any, ...]) -> None:
        inside, changes = change
        begin, end = (index, len(good) - 8) if inside == "index" else (0, len(good))
        changed = change_bytes(good[begin:end], changes)
        if inside == "index":  # which its length must fit, or nothing behind that check is reached
            path.write_bytes(good[:begin] + changed + len(changed).to_bytes(4, "little") + good[-4:])
        else:
            path.write_bytes(changed)
        try:
            text = open_shards("--data-path", "set", [str(path)], "text", directory / "index")
            for block in range(text.blocks):
                for line in text.read(block).splitlines():
                    json.loads(line)
        finally:  # the limit on memory is for one file, and the pool keeps what earlier ones took
            pyarrow.default_memory_pool().release_unused()

    return execute


def _deepspeed(directory: Path) -> Execute:
    """A file of DeepSpeed's, whose content is obeyed or refused."""
    path = directory / "ds.json"
    good = json.dumps(_DEEPSPEED, indent=2).encode()

    def execute(change: tuple[Any, ...]) -> None:
        _write_json(path, good, change)
        argv = [*FLAGS, "--deepspeed_config", str(path)]
        parsed = parse_command_line(argv, ranks=lambda plan: 2)
        assert parsed == parse_command_line(argv, ranks=lambda plan: 2)
        assert Config.from_json(parsed.config.to_json()) == parsed.config

    return execute


_DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "reduce_bucket_size": 5e8,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
    },
    "tensorboard": {"enabled": True, "output_path": "out", "job_name": "gpt"},
    "amp": {"enabled": False},
    "wall_clock_breakdown": False,
}


def _either() -> st.SearchStrategy:
    """Changes of a JSON file's bytes, or of the values in it."""
    return st.one_of(st.tuples(changes_of_bytes(), st.none()), st.tuples(st.none(), changes_of_json()))


def _of(*targets: str) -> st.SearchStrategy:
    return st.tuples(st.sampled_from(targets), changes_of_bytes(), changes_of_json())


_FIELDS = st.lists(_FIELD, max_size=3)
_SOME_BYTES: st.SearchStrategy = st.one_of(st.just([]), changes_of_bytes())
READERS = (
    Reader("index", st.tuples(_FIELDS, st.booleans(), _SOME_BYTES, _SOME_BYTES), _index),
    Reader("data checksums", _either(), _data_checksums),
    Reader("provenance", _either(), _provenance),
    Reader("checkpoint", _of(*_TARGETS), _checkpoint),
    Reader("sentencepiece bpe", changes_of_bytes(), _sentencepiece("bpe")),
    Reader("sentencepiece unigram", changes_of_bytes(), _sentencepiece("unigram")),
    Reader("gpt2", _of("vocab.json bytes", "merges.txt bytes", "vocab.json values"), _gpt2),
    Reader("deepspeed", _either(), _deepspeed),
    Reader(
        "hugging face model",
        _of("config", "config bytes", "index", "header", "weights bytes"),
        _hugging_face_model,
    ),
    Reader("parquet", st.tuples(st.sampled_from(["index", "index", "file"]), changes_of_bytes()), _parquet),
    Reader(
        "hugging face",
        _of(*["tokenizer.json values"] * 2, "tokenizer_config.json values", "tokenizer.json bytes"),
        _hugging_face,
    ),
)
