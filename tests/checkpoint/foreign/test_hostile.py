"""Small files that would take hours or all memory end in seconds with one line.

Pickles are written by hand: making such values would take as long here.
"""

import io
import json
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

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

from megatron_zpp.checkpoint.foreign.deepspeed import read_zero
from megatron_zpp.checkpoint.foreign.importing import whole_weights
from megatron_zpp.checkpoint.foreign.model import ForeignModel, ForeignTensor
from megatron_zpp.checkpoint.foreign.torch_dist import _size, read_torch_dist
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer
from tests.checkpoint.foreign.imports import TOKENIZER, run_import
from tests.support import ROOT, environment

SECONDS, MEMORY = 30, 1 << 30  # for a file, of processors that others use as well; bytes beyond the file
STORAGE = {"data/0": bytes(4096)}


def archive(value: bytes, **files: bytes) -> bytes:
    """What torch.save writes, of the opcodes of a value."""
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


def tensor(sizes: list[int], strides: list[int]) -> bytes:
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu")
    numbers = [b"(" + b"".join(map(number, each)) + b"t" for each in (sizes, strides)]
    arguments = b"(" + storage + number(1024) + b"tQ" + number(0) + b"".join(numbers) + b"\x89}t"
    return name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def fan(width: int, levels: int, key: str) -> bytes:
    """A model of dictionaries whose values are all the same dictionary, and so on."""
    made = kept(tensor([1], [1]), 0)
    for level in range(levels):
        entries = b"".join(text(f"{key}{index}") + again(level) for index in range(width))
        made += kept(b"}(" + entries + b"u", level + 1)
    return made + b"}" + text("model") + again(levels) + b"s"


PAIRS = listed(b"".join(text(f"k{index}") + b"N\x86" for index in range(20_000)))
NUMBERS = listed(b"".join(b"J" + struct.pack("<i", index) for index in range(20_000)))
WIDE = b"(" + b"K\x01" * 100_000 + b"t"
COLLIDING = (1 << 61) - 1  # Python's hash of its multiples is 0
TWO = (b"J" + struct.pack("<i", -1), b"J" + struct.pack("<i", -2))  # both have the hash -2


def colliding_tuples(count: int) -> bytes:
    keys = (b"(" + b"".join(TWO[index >> bit & 1] for bit in range(16)) + b"tN" for index in range(count))
    return b"}(" + b"".join(keys) + b"u"


COPIES = "opcodes and copies of values"
CASES: dict[str, tuple[bytes, str]] = {
    "dictionaries of one list": (
        archive(called_again(name("collections", "OrderedDict"), PAIRS, 20_000)),
        COPIES,
    ),
    "sets of one list": (archive(called_again(name("builtins", "set"), NUMBERS, 20_000)), COPIES),
    "sizes of one list": (archive(called_again(name("torch", "Size"), NUMBERS, 20_000)), COPIES),
    "bytes of one text": (
        archive(called_again(name("_codecs", "encode"), text("a" * 1_000_000), 20_000)),
        "copies more text than it has",
    ),
    "a wide tuple as keys": (archive(kept(WIDE, 1) + listed((b"}" + again(1) + b"Ns") * 20_000)), COPIES),
    "numbers that collide": (
        archive(b"}(" + b"".join(number(COLLIDING * index) + b"N" for index in range(50_000)) + b"u"),
        "has a key of more than 60 bits",
    ),
    "tuples that collide": (archive(colliding_tuples(60_000)), "has more than 5,000 tuples as keys"),
    "a long number": (
        archive(b"\x8b" + struct.pack("<i", 1 << 24) + b"\x7f" * (1 << 24)),
        "has a number of more than 2048 bits",
    ),
    "long keys that are compared": (archive(b"}" + text("a" * 1_000_000) + b"Ns"), "has a key of more than"),
    "long names": (archive(kept(text("torch." + "a" * 1000), 1) + again(1) + text("a") + b"\x93"), "longer"),
    "deep tuples": (archive(b")" + b"\x85" * 2_000_000), "has values nested deeper than those of any model"),
    "deep dictionaries": (
        archive(b"}" + (text("a") + b"}") * 100_000 + b"s" * 100_000),
        "has values nested deeper",
    ),
    "empty sets": (archive(listed(b"\x8f" * 4_000_000)), COPIES),
    "empty lists": (archive(listed(b"]" * 20_000_000)), COPIES),
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
        archive(b"}", **{f"data/{index:050}": b"" for index in range(200_000)}),
        "its list of files is longer than 16,777,216 bytes",
    ),
    "a long byteorder": (archive(b"}", byteorder=b"little" * 10_000_000), "big-endian"),
}  # fmt: skip
READER = """
import json, sys, time
from pathlib import Path
from megatron_zpp.checkpoint.foreign.model import flatten
from megatron_zpp.checkpoint.foreign.torch_file import read_torch_file

def highest():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

for file in map(Path, sys.argv[1:]):
    open("/proc/self/clear_refs", "w").write("5")
    before, began, said = highest(), time.monotonic(), ""
    try:
        value = read_torch_file(file)
        if isinstance(value, dict) and "model" in value:
            flatten(file, value["model"])
        del value
    except ValueError as error:
        said = str(error)
    print(json.dumps([file.name, time.monotonic() - began, highest() - before, said]), flush=True)
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, int, str]]:
    """Seconds, bytes and words of each case, in one process that has imported torch."""
    directory = tmp_path_factory.mktemp("hostile")
    for case, (content, _) in CASES.items():
        (directory / case).write_bytes(content)
    command = [sys.executable, "-c", READER, *(str(directory / case) for case in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return {case: tuple(found) for case, *found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_a_file_ends_in_seconds_and_one_line(case: str, read: dict[str, tuple[float, int, str]]) -> None:
    content, expected = CASES[case]
    seconds, memory, said = read[case]
    assert expected in said
    assert len(said.splitlines()) <= 1
    assert not said or case in said  # it names the file
    assert seconds < SECONDS
    assert memory < MEMORY + len(content)


def shared(times: int = 60) -> Any:
    """A list with 2^times paths."""
    value: Any = [0]
    for _ in range(times):
        value = [value, value]
    return value


ARGS = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
WEIGHTS = {
    f"decoder.layers.0.{part}": torch.zeros(1)
    for part in ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
}


@pytest.mark.parametrize(
    ("args", "state", "said"),
    [
        ({"window_size": shared()}, {}, "describe no model of ours: --window-size of several"),
        ({"num_experts": shared()}, {}, "its model has num_experts of several values"),
        ({"position_embedding_type": shared()}, {}, "has position_embedding_type of several values"),
        ({"normalization": shared()}, {}, "has normalization of several values"),
        ({"rotary_base": shared(), "position_embedding_type": "rope"}, {}, "rotary_base of several values"),
        ({}, {"checkpoint_version": shared()}, "checkpoint_version of several values; load and save"),
        ({"num_layers": 1 << 40}, {}, "--num-layers 1099511627776: must be at most 10000"),
        ({"num_layers": 1000}, {}, "its args say 1000 layers, and it does not have the last of them"),
        ({"hidden_size": 1 << 20}, {}, "its args ask for one of shape (8, 1048576)"),
        ({"ffn_hidden_size": 1 << 62}, {}, "its args describe"),
        ({}, {"iteration": shared()}, "has no embedding.positions.weight"),
    ],
)  # fmt: skip
def test_settings_that_never_end_are_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: dict[str, Any],
    state: dict[str, Any],
    said: str,
) -> None:
    folder, began = tmp_path / "old/iter_0000007/mp_rank_00", time.monotonic()
    folder.mkdir(parents=True)
    whole = {"model": WEIGHTS, "checkpoint_version": 3.0, "args": Namespace(**ARGS | args)} | state
    torch.save(whole, folder / "model_optim_rng.pt")
    with pytest.raises(ValueError, match=r"its|has|checkpoint_version") as error:
        run_import(monkeypatch, capsys, tmp_path / "old", "--output", tmp_path / "new", *TOKENIZER)
    assert said in str(error.value)
    assert len(str(error.value)) < 600
    assert time.monotonic() - began < SECONDS


def test_a_model_of_many_layers_that_are_not_there_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "old/iter_0000007/mp_rank_00"
    folder.mkdir(parents=True)
    weights = {"decoder.layers.9999.self_attention.linear_qkv.weight": torch.zeros(1)}
    args = Namespace(**ARGS | {"num_layers": 10_000})
    torch.save({"model": weights, "checkpoint_version": 3.0, "args": args}, folder / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="its args say 10000 layers, and it has 1 tensors"):
        run_import(monkeypatch, capsys, tmp_path / "old", "--output", tmp_path / "new", *TOKENIZER)


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


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([dict.fromkeys(map(str, range(1000)), (1,))] * 1000, "have more than 200,000 names"),
        ([{"a": (1 << 59,) * 100}], "have a shape that is none"),
        ([{"a": (1 << 70,)}], "have a size that is none"),
        ([{"a": shared()}], "have a size that is none"),
    ],
)
def test_shapes_of_deepspeed_are_bounded(tmp_path: Path, groups: list[Any], said: str) -> None:
    torch.save({"param_shapes": groups}, tmp_path / "mp_rank_00_model_states.pt")
    flat = {"optimizer_state_dict": {"zero_stage": 1, "single_partition_of_fp32_groups": []}}
    torch.save(flat, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=said):
        read_zero(tmp_path)


@pytest.mark.parametrize("value", [5, [1], {1}])
def test_a_file_without_a_dictionary_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"model_states\.pt: holds no dictionary; copy it again"):
        read_zero(tmp_path)


@pytest.mark.parametrize("value", [(1,) * 65, (1 << 60,), (-1,), 3, "text", [(1,)]])
def test_sizes_of_metadata_are_bounded(value: Any) -> None:
    with pytest.raises(TypeError, match="size"):
        _size(value)


@pytest.mark.timeout(400)
def test_the_metadata_of_a_large_checkpoint_is_read(tmp_path: Path) -> None:
    """100,000 blocks: 125 tensors, most of them of an optimizer, of 100 layers on 8 ranks."""
    places = [torch.Size([layer, 16 * rank, 0]) for layer in range(100) for rank in range(8)]
    block, whole = torch.Size([1, 16, 8]), torch.Size([100, 128, 8])
    weight = "decoder.layers.mlp.linear_fc2.weight"
    names = [weight, *(f"optimizer.state.exp_avg.{index}.{weight}" for index in range(124))]
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
    torch.save({"args": Namespace(**ARGS)}, tmp_path / "common.pt")
    found = read_torch_dist(tmp_path).tensors
    assert {tensor.shape for tensor in found.values()} == {(128, 8)}
    assert len(found) == 100


def test_short_lists_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is that of weights which are not there."""
    folder = tmp_path / "old/iter_0000007/mp_rank_00"
    folder.mkdir(parents=True)
    args = Namespace(**ARGS, window_size=[3, 0], spec=[], num_experts=[1])
    torch.save({"model": WEIGHTS, "checkpoint_version": 3.0, "args": args}, folder / "model_optim_rng.pt")
    with pytest.raises(ValueError, match=r"has no embedding\.positions\.weight; its args ask for one"):
        run_import(monkeypatch, capsys, tmp_path / "old", "--output", tmp_path / "new", *TOKENIZER)
