"""Files whose bytes are changed, and what reads them: the oracle of `flips.py`.

A target's `read` returns everything that a run would take from its files. After a change it must return the
same, or raise one line. Files that other programs write may have no digest: a changed value in them cannot be
told from another good file. Such a target has `independent`, a second reader that shares no code with the
first, and `read` must then return what `independent` finds.
"""

import gzip
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
import zstandard
from safetensors.numpy import load_file

from megatron_zpp.checkpoint.directory import candidates, checkpoint_path
from megatron_zpp.checkpoint.foreign.torch_file import StoredTensor, read_torch_file
from megatron_zpp.checkpoint.huggingface.load import open_weights
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.checkpoint.write import SaveOptions, write_checkpoint
from megatron_zpp.config.root import parse_args, parse_command_line
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.corpus.inputs import read_blocks, whole
from megatron_zpp.data.indexed import IndexedDataset, token_dtype
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.data.provenance import check_provenance, write_provenance
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.shards.text import open_shards
from megatron_zpp.data.text.sources import JsonLinesText, TextSource
from megatron_zpp.data.verify import verify_tokens
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.memory_snapshots.copies import MemoryCopies, SnapshotName, file_names
from megatron_zpp.memory_snapshots.name import memory_name, write_memory_name
from megatron_zpp.native.library_file import install, problem_of
from megatron_zpp.storage.lease import LEASE, Holder
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.checkpoint.saving import FIRST, small, train
from tests.data.format_by_hand import write_by_hand
from tests.faults.site import train_bpe, write_gpt2

TEXT = "The 1st text, twice: the 1st text.\n\tnaïve 日本 😀<|endoftext|></s>"
OF_SMALL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 8 --micro-batch-size 2 --train-iters 1 --lr 1 --eval-iters 0"
)


@dataclass(frozen=True)
class Target:
    """`files` of one kind. Of `settings`, `independent` returns something else than before if `read` does."""

    name: str
    files: tuple[Path, ...]
    read: Callable[[], Any]
    independent: Callable[[], Any] | None = None
    settings: bool = False


Make = Callable[[Path], Target]


def _token_files(directory: Path) -> Target:
    prefix = str(directory / "x")
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for length in range(40):
            writer.add_document(list(range(length)))

    def read() -> Any:
        data = IndexedDataset(prefix)
        if data.checksums is not None:
            verify_tokens([data], 0, 1)
        return [part[:].tobytes() for part in (data.tokens, data.lengths, data.pointers)]

    files = [Path(f"{prefix}.{kind}") for kind in ("idx", "bin", "checksums.json")]
    return Target("token files", tuple(files), read)


def _foreign_token_files(directory: Path) -> Target:
    """Those of Megatron-LM, which have no checksums."""
    prefix = str(directory / "x")
    write_by_hand(prefix, [list(range(length % 30)) for length in range(40)])

    def read() -> Any:
        data = IndexedDataset(prefix)
        return data.tokens[:].tolist(), data.lengths[:].tolist()

    def independent() -> Any:
        index = Path(f"{prefix}.idx").read_bytes()
        kind = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}[index[17]]
        (sequences,) = struct.unpack_from("<Q", index, 18)
        lengths = list(struct.unpack_from(f"<{sequences}i", index, 34))
        content = Path(f"{prefix}.bin").read_bytes()
        return list(struct.unpack(f"<{sum(lengths)}{kind}", content)), lengths

    files = (Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    return Target("token files of Megatron-LM", files, read, independent)


OURS = {"tokenizer_type": "NullTokenizer", "vocab_size": 100, "eod": 99, "fingerprint": "f" * 64}


def _record_of_tokenizer(directory: Path) -> Target:
    write_provenance(directory / "x", OURS)
    file = directory / "x.tokenizer.json"
    return Target("record of the tokenizer", (file,), partial(check_provenance, directory / "x", OURS))


def _checkpoint(directory: Path, name: str = "checkpoint", **zero: object) -> Target:
    """With a tokenizer's files in it, as a run has them."""
    train_bpe(directory, [TEXT])
    tokenizer_config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(directory / "vocab.json"),
        merge_file=str(directory / "merges.txt"),
    )
    tokenizer = build_tokenizer(tokenizer_config)
    engine = small(**zero)
    train(engine, 1, seed=1)
    argv = OF_SMALL.replace("--tokenizer-type NullTokenizer --vocab-size 49", "").split()
    argv += ["--tokenizer-type", "GPT2BPETokenizer"]
    argv += ["--vocab-file", str(directory / "vocab.json"), "--merge-file", str(directory / "merges.txt")]
    path = checkpoint_path(directory / "saved", FIRST.iteration)
    config, known = parse_args(argv).to_json(), describe(tokenizer)
    state = describe_state(engine, FIRST, with_optimizer=True, config=config, tokenizer=known)
    exchange = Exchange(dist.HashStore(), engine.topology, timedelta(seconds=60), "save")
    shards = shards_of(engine, with_optimizer=True)
    write_checkpoint(path, shards, state, exchange, SaveOptions(), beside=tokenizer.files())

    def read() -> Any:
        with CheckpointReader(candidates(str(path.parent))[0]) as reader:
            weights = {name: tensor.numpy().tobytes() for name, tensor in reader.parameters().items()}
            found, _ = trained_tokenizer(reader)
            reader.check_rest(0, 1)
            return weights, reader.state, describe(found)

    return Target(name, tuple(sorted(path.iterdir())), read)


def _name_of_memory(directory: Path) -> Target:
    """Where a run's copies in memory are."""
    write_memory_name(str(directory), None)
    return Target(
        "name of the copies in memory", tuple(directory.iterdir()), lambda: memory_name(str(directory))
    )


def _memory_snapshot(directory: Path) -> Target:
    """The copy of one rank, and the checkpoint that a start makes of it."""
    engine = small(zero_stage=3)
    train(engine, 1, seed=1)
    tokenizer = describe(build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=49)))
    config = parse_args(OF_SMALL.split()).to_json()
    state = describe_state(engine, FIRST, with_optimizer=True, config=config, tokenizer=tokenizer)
    copies, snapshot = MemoryCopies(directory / "memory", 0), SnapshotName(FIRST.iteration, "0" * 8)
    copies.write(snapshot, 0, shards_of(engine, with_optimizer=True), state)

    def read() -> Any:
        found, problems = copies.found()
        if problems:
            raise ValueError(*problems)
        copies.assemble(snapshot, [copy.rank for copy in found[snapshot]], directory / "made")
        with CheckpointReader(directory / "made") as reader:
            weights = {name: tensor.numpy().tobytes() for name, tensor in reader.parameters().items()}
            reader.check_rest(0, 1)
            return weights, reader.state

    files = [copies.find(name) for name in file_names(snapshot, 0)]
    return Target("memory snapshot", tuple(file for file in files if file is not None), read)


def _cached_order(directory: Path) -> Target:
    values = {"a": np.arange(300, dtype=np.int64), "b": np.arange(77, dtype=np.uint16)}
    said: list[str] = []
    cache = OrderCache("--data-cache-path", "x", directory / "cache", said.append)

    def build(files: Any) -> None:
        for name, array in values.items():
            files.save(name, array)

    def read() -> Any:
        found = cache.get({"of": 1}, tuple(values), build, "an order")
        return [found[name][:].tobytes() for name in values]

    read()
    (entry,) = (path for path in (directory / "cache").iterdir() if path.is_dir())
    return Target("cached order", tuple(sorted(entry.iterdir())), read)


def _cached_tokens(directory: Path) -> Target:
    """Blocks that are damaged are tokenised again; no run may see another token."""
    text = directory / "text.jsonl"
    write_lines(text, 90)
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    (directory / "tokens").mkdir()
    source = JsonLinesText("--data-path", str(text), str(text))
    encoder = partial(Encoder, config, ("text",), True)
    blocks = np.arange(source.blocks)

    def read() -> Any:
        cache = TokenCache(directory / "tokens", source, encoder, token_dtype(101), skip=False, workers=0)
        return cache.tokens(blocks).tobytes()

    read()
    files = [path for path in (directory / "tokens").rglob("*") if path.is_file() and path.stat().st_size]
    return Target("cached tokens", tuple(sorted(files)), read)


def _tokenizer(directory: Path, kind: str, names: tuple[str, ...]) -> Target:
    """Data and checkpoints keep its fingerprint: a changed one is refused when either is opened."""
    train_bpe(directory, [TEXT])
    (directory / "t.model").write_bytes(train_sentencepiece([TEXT * 9], 293, "bpe"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    files = [str(directory / name) for name in names]
    if kind == "GPT2BPETokenizer":
        config = TokenizerConfig(tokenizer_type=kind, vocab_file=files[0], merge_file=files[1])
    else:
        config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=files[0])
    write_provenance(directory / "x", describe(build_tokenizer(config)))

    def read() -> Any:
        tokenizer = build_tokenizer(config)
        check_provenance(directory / "x", describe(tokenizer))
        ids = tokenizer.encode_batch([TEXT])[0]
        return ids, tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.eod

    return Target(f"{kind} with its data", tuple(map(Path, files)), read)


def _hugging_face_model(directory: Path) -> Target:
    write_gpt2(directory / "hf", vocabulary=50, positions=8, width=32, heads=4, layers=2)
    config, weights = directory / "hf/config.json", directory / "hf/model.safetensors"
    model = parse_args(OF_SMALL.split()).model

    def read() -> Any:
        with open_weights(str(directory / "hf"), model, OURS | {"vocab_size": 50}) as opened:
            return _unlike_ones(tensor.numpy() for tensor in opened.parameters().values())

    def independent() -> Any:
        json.loads(config.read_bytes())
        return _unlike_ones(load_file(weights).values())

    return Target("Hugging Face model", (config, weights), read, independent)


def _unlike_ones(tensors: Iterable[np.ndarray]) -> list[int]:
    """The bits of all elements but ones and zeros: the file has ones, and padding is zeros."""
    bits = np.concatenate([np.ascontiguousarray(one, np.float32).view(np.uint32).ravel() for one in tensors])
    return sorted(bits[(bits != 0x3F800000) & (bits != 0)].tolist())


def _torch_file(directory: Path) -> Target:
    path = directory / "x.pt"
    model = {"a": torch.arange(300.0), "b": torch.ones(5, 7).bfloat16()}
    torch.save({"model": model, "iteration": 7}, path)  # noqa: TID251 - the format that is read

    def read() -> Any:
        found = read_torch_file(path)
        tensors = {name: tensor.read() for name, tensor in found["model"].items()}
        assert all(isinstance(tensor, StoredTensor) for tensor in found["model"].values())
        bits = {
            name: (str(one.dtype), one.view(torch.uint8).numpy().tobytes()) for name, one in tensors.items()
        }
        return found["iteration"], bits

    return Target("file of torch.save", (path,), read)


def _deepspeed(directory: Path) -> Target:
    path = directory / "ds.json"
    path.write_text(json.dumps(_DEEPSPEED, indent=2))
    argv = [*OF_SMALL.split(), "--deepspeed_config", str(path)]

    def read() -> Any:
        return parse_command_line(argv, ranks=lambda plan: 2).config.to_json()

    def independent() -> Any:
        found = json.loads(path.read_bytes())
        found["optimizer"]["type"] = found["optimizer"]["type"].lower()  # its case has no meaning
        return found

    return Target("DeepSpeed's JSON", (path,), read, independent, settings=True)


_DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "eps": 1e-8}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2},
}


def _settings_file(directory: Path) -> Target:
    path = directory / "run.yaml"
    path.write_text(
        "model:\n  num_layers: 2\n  hidden_size: 32\ntraining:\n  seed: 1234\nlr: 0.001\nsave: out\n"
    )
    argv = OF_SMALL.replace("--num-layers 2 --hidden-size 32", "").replace("--lr 1 ", "").split()
    argv += ["--config", str(path)]

    def read() -> Any:
        return parse_command_line(argv, ranks=lambda plan: 1).config.to_json()

    def independent() -> Any:
        """Names may stand in their section or outside of it, and with - for _."""
        found = {}
        for name, value in yaml.safe_load(path.read_bytes()).items():
            found |= value if isinstance(value, dict) else {name: value}
        return {name.replace("-", "_"): value for name, value in found.items()}

    return Target("settings in YAML", (path,), read, independent, settings=True)


def _compiled(directory: Path) -> Target:
    """A library of the cache: what is not as it was installed is built again."""
    (directory / "built").write_bytes(bytes(range(256)) * 20)
    library = directory / "kernel.so"
    install(directory / "built", library)

    def read() -> Any:
        if problem := problem_of(library):
            raise ValueError(f"{library}: {problem}")
        return library.read_bytes()

    return Target("compiled library", (library, directory / "kernel.so.sha256"), read)


def _lease(directory: Path) -> Target:
    """The record of the process that uses --save: one that is damaged is not believed."""
    path = directory / LEASE
    path.write_bytes(Holder.of_this_process().encode())

    def read() -> Any:
        holder = Holder.decode(path.read_bytes())
        if holder is None:
            raise ValueError(f"{path}: not the record of a process")
        return holder

    return Target("lease", (path,), read)


def _json_lines(directory: Path) -> Target:
    """Text of a person's, which has no digest."""
    path = directory / "text.jsonl"
    write_lines(path, 40)
    encoder = Encoder(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100), ("text",), True)

    def read() -> Any:
        return _tokens(JsonLinesText("--data-path", str(path), str(path)), encoder)

    def independent() -> Any:
        found: list[int] = []
        for line in path.read_bytes().split(b"\n"):
            if line.strip():
                found += [*map(int, json.loads(line)["text"].split()), 100]
        return found

    return Target("text", (path,), read, independent)


def _tokens(source: TextSource, encoder: Encoder) -> list[int]:
    """The tokens of all blocks."""
    found: list[int] = []
    for block in range(source.blocks):
        encoded = encoder(source.read(block))
        if encoded.problems.counts:
            raise ValueError(f"{source.location(block, 1)}: {encoded.problems.first[0].detail}")
        found += encoded.tokens[0].tolist()
    return found


def write_lines(path: Path, number: int) -> None:
    """A document of two tokens on each line."""
    path.write_text("".join(json.dumps({"text": f"{n} {n + 1}"}) + "\n" for n in range(number)))


def _compressed(directory: Path, suffix: str) -> Target:
    """Text with the checksum of its compression."""
    path = directory / f"text.jsonl.{suffix}"
    content = "".join(json.dumps({"text": f"{n} {n + 1}"}) + "\n" for n in range(200)).encode()
    if suffix == "gz":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content))

    def read() -> Any:
        return b"".join(block.content for block in read_blocks(whole(str(path)), 1 << 16))

    return Target(f"text in .{suffix}", (path,), read)


def _parquet(directory: Path) -> Target:
    """Text with the checksums of its pages; the index behind them has none."""
    import pyarrow
    import pyarrow.parquet

    path = directory / "text.parquet"
    table = pyarrow.table({"text": [f"{n} {n + 1}" for n in range(200)]})
    pyarrow.parquet.write_table(table, path, row_group_size=60, write_page_checksum=True)
    encoder = Encoder(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=300), ("text",), True)

    def read() -> Any:
        return _tokens(open_shards("--data-path", "set", [str(path)], "text", directory / "index"), encoder)

    return Target("text in Parquet", (path,), read)


TOKENIZERS = (
    ("SentencePieceTokenizer", ("t.model",)),
    ("GPT2BPETokenizer", ("vocab.json", "merges.txt")),
    ("HuggingFaceTokenizer", ("tokenizer.json", "tokenizer_config.json")),
)
TARGETS: tuple[tuple[int, Make], ...] = (  # each with its share of the changes: slow readers get fewer
    (40, _token_files),
    (200, _foreign_token_files),
    (200, _record_of_tokenizer),
    (10, _checkpoint),
    (40, _cached_order),
    (40, _cached_tokens),
    *((200, partial(_tokenizer, kind=kind, names=names)) for kind, names in TOKENIZERS),
    (10, _hugging_face_model),
    (40, _torch_file),
    (1, _deepspeed),
    (1, _settings_file),
    (200, _compiled),
    (200, _json_lines),
    *((200, partial(_compressed, suffix=suffix)) for suffix in ("gz", "zst")),
    (10, partial(_checkpoint, name="checkpoint of blocks of a table", zero_stage=1, zero_table_rows=16)),
    (10, _memory_snapshot),
    (200, _name_of_memory),
    (10, _parquet),
    (100, _lease),
)
