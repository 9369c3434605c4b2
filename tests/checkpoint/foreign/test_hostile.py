"""Small files that would take hours or all memory end in seconds with one line.

Pickles are written by hand: making such values would take as long here.
"""

import io
import pickle
import resource
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_zpp.checkpoint.foreign import pickled
from megatron_zpp.checkpoint.foreign.importing import whole_weights
from megatron_zpp.checkpoint.foreign.model import ForeignModel, ForeignTensor, flatten
from megatron_zpp.checkpoint.foreign.torch_dist import read_torch_dist
from megatron_zpp.checkpoint.foreign.torch_file import read_torch_file
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer
from tests.forkserver import CONTEXT

SECONDS, MEMORY = 30, 700 << 20  # for a file, of processors that others use as well
STORAGE = {"data/0": bytes(4096)}


Archive: TypeAlias = Callable[
    [], bytes
]  # made where it is read: some take seconds, and every worker collects all


def archive(value: bytes, **files: bytes) -> Archive:
    """Makes what torch.save writes, of the opcodes of a value."""
    return partial(_archive, value, files)


def _archive(value: bytes, files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, content in {"data.pkl": b"\x80\x04" + value + b".", "byteorder": b"little"}.items():
            file.writestr(f"x/{name}", files.get(name, content))
        for name in files.keys() - {"data.pkl", "byteorder"}:
            file.writestr(f"x/{name}", files[name])
    return made.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + b"\x93"


def kept(value: bytes, place: int) -> bytes:
    """Put a value into the memo, and not on the stack."""
    return value + b"q" + bytes([place]) + b"0"


def again(place: int) -> bytes:
    return b"h" + bytes([place])


def listed(parts: bytes) -> bytes:
    return b"](" + parts + b"e"


def called_again(of: bytes, argument: bytes, times: int) -> bytes:
    """A list of calls of one function, all with the same argument."""
    return kept(of, 1) + kept(argument, 2) + listed((again(1) + again(2) + b"\x85R") * times)


def storage(key: bytes) -> bytes:
    return b"(" + text("storage") + name("torch", "FloatStorage") + key + text("cpu") + number(1024) + b"tQ"


def tensor(sizes: list[int], strides: list[int]) -> bytes:
    numbers = [b"(" + b"".join(map(number, each)) + b"t" for each in (sizes, strides)]
    arguments = b"(" + storage(text("0")) + number(0) + b"".join(numbers) + b"\x89}t"
    return name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def fan(width: int, levels: int, key: str) -> bytes:
    """A model of dictionaries whose values are all the same dictionary, and so on."""
    made = kept(tensor([1], [1]), 0)
    for level in range(levels):
        entries = b"".join(text(f"{key}{index}") + again(level) for index in range(width))
        made += kept(b"}(" + entries + b"u", level + 1)
    return made + b"}" + text("model") + again(levels) + b"s"


def shared(begin: bytes, end: bytes) -> bytes:
    """A container of the same container twice, and so on: it has 2^60 paths."""
    made = kept(b"N", 0)
    for level in range(60):
        made += kept(begin + again(level) * 2 + end, level + 1)
    return made + again(60)


PAIRS = listed(b"".join(text(f"k{index}") + b"N\x86" for index in range(20_000)))
NUMBERS = listed(b"".join(b"J" + struct.pack("<i", index) for index in range(20_000)))
WIDE = b"(" + b"K\x01" * 100_000 + b"t"
COLLIDING = (1 << 61) - 1  # Python's hash of its multiples is 0
TWO = (b"J" + struct.pack("<i", -1), b"J" + struct.pack("<i", -2))  # both have the hash -2


def colliding_tuples(count: int) -> bytes:
    keys = (b"(" + b"".join(TWO[index >> bit & 1] for bit in range(16)) + b"tN" for index in range(count))
    return b"}(" + b"".join(keys) + b"u"


COPIES = "opcodes and copies of values"
NESTED = "has a nested tuple as a key"
OPCODE = "has an opcode that no model needs"
CASES: dict[str, tuple[Archive, str]] = {
    "dictionaries of one list": (
        archive(called_again(name("collections", "OrderedDict"), PAIRS, 20_000)),
        COPIES,
    ),
    "sets of one list": (archive(called_again(name("builtins", "set"), NUMBERS, 20_000)), COPIES),
    "sizes of one list": (archive(called_again(name("torch", "Size"), NUMBERS, 20_000)), COPIES),
    "bytes of one text": (
        archive(called_again(name("_codecs", "encode"), text("a" * 1_000_000), 20_000)),
        COPIES,
    ),
    "a wide tuple as keys": (archive(kept(WIDE, 1) + listed((b"}" + again(1) + b"Ns") * 20_000)), COPIES),
    "numbers that collide": (
        archive(b"}(" + b"".join(number(COLLIDING * index) + b"N" for index in range(50_000)) + b"u"),
        "has a key of more than 60 bits",
    ),
    "tuples that collide": (archive(colliding_tuples(60_000)), "has more than 5,000 tuples as keys"),
    "a long number": (archive(b"\x8b" + struct.pack("<i", 1 << 24) + b"\x7f" * (1 << 24)), OPCODE),
    "bytes that are not there": (archive(b"\x96" + struct.pack("<Q", 1 << 34)), OPCODE),
    "calls that are not counted": (
        archive(kept(PAIRS, 1) + b"(" + name("collections", "OrderedDict") + again(1) + b"o"),
        OPCODE,
    ),
    "long keys that are compared": (archive(b"}" + text("a" * 1_000_000) + b"Ns"), "has a key of more than"),
    "long names": (archive(kept(text("torch." + "a" * 1000), 1) + again(1) + text("a") + b"\x93"), "longer"),
    "deep tuples": (archive(b")" + b"\x85" * 1_000_000), ""),
    "deeper tuples": (archive(b")" + b"\x85" * 2_000_000), COPIES),
    "deep dictionaries": (
        archive(b"}" + text("model") + (b"}" + text("a")) * 100_000 + b"N" + b"s" * 100_001),
        "has a name of more than 1,000",
    ),
    "shared lists": (archive(shared(b"](", b"e")), ""),
    "shared tuples": (archive(shared(b"(", b"t")), ""),
    "shared tuples as a key": (archive(b"}" + shared(b"(", b"t") + b"Ns"), NESTED),
    "shared tuples as keys": (archive(b"}(" + shared(b"(", b"t") + b"Nu"), NESTED),
    "shared tuples in a dictionary": (archive(b"(" + shared(b"(", b"t") + b"Nd"), NESTED),
    "shared tuples in a set": (archive(b"\x8f(" + shared(b"(", b"t") + b"\x90"), NESTED),
    "shared tuples in a frozen set": (archive(b"(" + shared(b"(", b"t") + b"\x91"), NESTED),
    "shared tuples in a called set": (
        archive(name("builtins", "set") + b"](" + shared(b"(", b"t") + b"e\x85R"),
        NESTED,
    ),
    "shared tuples in a called dictionary": (
        archive(name("collections", "OrderedDict") + b"](" + shared(b"(", b"t") + b"N\x86e\x85R"),
        NESTED,
    ),
    "shared tuples as a storage": (archive(storage(shared(b"(", b"t")), **STORAGE), "bytes are not there"),
    "empty sets": (archive(listed(b"\x8f" * 4_000_000)), COPIES),
    "empty lists": (archive(listed(b"]" * 4_000_000)), COPIES),
    "one tensor in many places": (
        archive(kept(tensor([32, 32], [32, 1]), 1) + listed(again(1) * 1_000_000), **STORAGE),
        "",
    ),
    "a long tensor": (archive(tensor([1 << 59], [1]), **STORAGE), "longer than its storage"),
    "a tensor of nothing, repeated": (archive(tensor([1 << 59], [0]), **STORAGE), "longer than its storage"),
    "a tensor beyond numbers": (archive(tensor([1 << 60, 0], [0, 0]), **STORAGE), "a size that none has"),
    "many dimensions": (archive(tensor([1] * 1000, [1] * 1000), **STORAGE), "more than 64 dimensions"),
    "dictionaries of one dictionary": (archive(fan(30_000, 2, "a"), **STORAGE), "in each other to more than"),
    "names that grow": (archive(fan(2, 50, "a" * 900), **STORAGE), "has a name of more than 1,000"),
    "a long list of files": (
        archive(b"}", **{f"data/{index:01000}": b"" for index in range(17_000)}),
        "its list of files is longer than 16,777,216 bytes",
    ),
    "a long byteorder": (archive(b"}", byteorder=b"little" * 10_000_000), "big-endian"),
}  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """One process that has imported torch and gets little more memory."""
    with CONTEXT.Pool(1, limit_memory) as pool:
        yield pool


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def read(file: Path) -> str:
    """What is said of a file, or nothing if it is read."""
    try:
        value = read_torch_file(file)
        if isinstance(value, dict) and "model" in value:
            flatten(file, value["model"])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [*CASES, pytest.param("20 million empty lists", marks=pytest.mark.nightly)])
def test_a_file_ends_in_seconds_and_one_line(case: str, process: Any, tmp_path: Path) -> None:
    content, expected = CASES.get(case) or (archive(listed(b"]" * 20_000_000)), COPIES)
    (tmp_path / case).write_bytes(content())
    said = process.apply_async(read, (tmp_path / case,)).get(SECONDS)
    assert expected in said
    assert len(said.splitlines()) <= 1
    assert not said or case in said  # it names the file


def test_weights_that_the_files_cannot_hold_are_not_allocated(tmp_path: Path) -> None:
    """All share a few bytes, which each of them claims to be all of."""
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8)
    tokenizer = NullTokenizer(89)
    shapes = {name: tuple(each.shape) for name, each in GPT(model, 90).named_parameters()}
    tensors = {name: ForeignTensor(shape, lambda: pytest.fail("read")) for name, shape in shapes.items()}
    (tmp_path / "small.pt").write_bytes(bytes(1000))
    foreign = ForeignModel("of a test", tmp_path, {}, 1, tensors)
    with pytest.raises(
        ValueError, match="its args describe 1,976 weights, more than its files of 1,000 bytes"
    ):
        whole_weights(foreign, model, tokenizer)


@pytest.mark.nightly
def test_the_metadata_of_a_large_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 blocks: 50 tensors, most of them of an optimizer, of 100 layers on 8 ranks."""
    places = [torch.Size([layer, 16 * rank, 0]) for layer in range(100) for rank in range(8)]
    block, whole = torch.Size([1, 16, 8]), torch.Size([100, 128, 8])
    weight = "decoder.layers.mlp.linear_fc2.weight"
    names = [weight, *(f"optimizer.state.exp_avg.{index}.{weight}" for index in range(49))]
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(torch.float32), whole, [ChunkStorageMetadata(place, block) for place in places]
        )
        for name in names
    }
    stored = {
        MetadataIndex(name, place, index): _StorageInfo(f"__{index % 8}_0.distcp", 1000 * index, 1000)
        for name in names
        for index, place in enumerate(places)
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, stored)))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save(
        {"args": Namespace(num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8)},
        tmp_path / "common.pt",
    )
    monkeypatch.setattr(pickled, "_FEW_STEPS", 0)  # what a larger one has per byte suffices
    found = read_torch_dist(tmp_path).tensors
    assert {tensor.shape for tensor in found.values()} == {(128, 8)}
    assert len(found) == 100
    monkeypatch.setattr(pickled, "_MOST_STEPS", 1_000_000)
    with pytest.raises(ValueError, match="has more than 1,000,000 opcodes and copies"):
        read_torch_dist(tmp_path)
