"""Pickles that would run code are refused in one line, and nothing of them runs."""

import os
import pickle
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.checkpoint.foreign.deepspeed import read_zero
from megatron_zpp.checkpoint.foreign.pickled import NotData, read_pickle
from megatron_zpp.checkpoint.foreign.torch_file import read_pickle_file, read_torch_file
from megatron_zpp.storage.checksums import DamagedFile
from tests.checkpoint.foreign.conftest import Tool
from tests.support import refusal


class Calls:
    """An object whose pickle calls a function when it is read, and may fill the result with a state."""

    def __init__(self, *call: Any, state: Any = None) -> None:
        self.call, self.state = call, state

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.call[0], self.call[1:], self.state)[: 2 + (self.state is not None)]


def crafted(marker: Path) -> dict[str, Any]:
    """What would create `marker` by each name."""
    return {
        "posix.system": Calls(os.system, f"touch {marker}"),
        "builtins.eval": Calls(eval, f"open({str(marker)!r}, 'w')"),
        "io.open": Calls(open, str(marker), "w"),
        "posix.mkdir": {"model": {"a": [Calls(os.mkdir, str(marker))]}},
        "subprocess.Popen": Calls(__import__("subprocess").Popen, ["touch", str(marker)]),
    }


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("name", crafted(Path()))
def test_code_is_refused_and_does_not_run(name: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = pickle.dumps(crafted(marker)[name], protocol)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(
        NotData, match=rf"names [\w.]*{name.split('.')[1]}, which is code .* nothing of it was run"
    ):
        read_pickle_file(tmp_path / ".metadata")
    torch.save(crafted(marker)[name], tmp_path / "model.pt", pickle_protocol=max(protocol, 2))
    with pytest.raises(NotData, match=r"model\.pt: names .*, which is code"):
        read_torch_file(tmp_path / "model.pt")
    assert not marker.exists()
    pickle.loads(content)  # so that the test would notice
    assert marker.exists() or name == "subprocess.Popen"


def test_what_a_name_of_a_library_gives_can_neither_be_used_nor_changed(tmp_path: Path) -> None:
    """A record, and not the function; a pickle cannot turn a tensor to another file, or a name around."""
    for call in (Calls(getattr, int, "real"), Calls(torch.hub.load, "a", "b")):
        found = read_pickle(pickle.dumps(call), lambda value: None)
        assert found.arguments[-1] in ("real", "b")
        assert str(found) in ("builtins.getattr(…)", "torch.hub.load(…)")
    tensor = (torch.storage.TypedStorage(3, dtype=torch.float32), 0, (3,), (1,), False, OrderedDict())
    other = {"path": "/etc/passwd", "storage": None, "shape": (1,)}
    torch.save(Calls(torch._utils._rebuild_tensor_v2, *tensor, state=other), tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    assert found.shape == (3,)
    assert found.storage.path == tmp_path / "x.pt"
    for state in (b"}X\x04\0\0\0nameX\x04\0\0\0evals", b"N}X\x04\0\0\0nameX\x04\0\0\0evals\x86"):
        assert read_pickle(b"\x80\x04ctorch\nSize\n" + state + b"b.", lambda value: None).name == "Size"
    assert read_pickle(b"\x80\x04ctorch\nSize\n](K\x03e\x85R.", lambda value: None) == (3,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"(",
        b"}u.",
        b"h\x05.",
        b"cposix\nsystem\n.",
        b"(S'a'\niposix\nsystem\n.",
        b"N\x85R.",
        b"N)R.",
        b"])\x81.",
        b"\x82\x01.",
        b"ctorch\n" + b"a" * 1000 + b"\n.",
    ],
)
def test_broken_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(NotData):
        read_pickle(content, lambda value: value)


def test_plain_values_and_tensors_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = OrderedDict(
        a=[1, -2, 3.5, None, True, "ü", b"b", (1,), {2}, 2**70],
        b=base[1:3, ::2],
        c=torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        d=torch.tensor(7),
        e=base,
        f=torch.empty(0, 3),
    )
    value._metadata = {"version": 1}  # type: ignore[attr-defined]  # as of a module's state
    torch.save(value, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    assert found["a"] == value["a"]
    for key in "bcdef":
        assert torch.equal(found[key].read(), value[key].detach())
        assert found[key].read().dtype == value[key].dtype


def test_tensors_larger_than_their_bytes_are_refused(tmp_path: Path) -> None:
    storage = torch.storage.TypedStorage(3, dtype=torch.float32)
    for offset, shape in ((-1, (1,)), (0, (-1,)), (0, ("a",))):
        tensor = (storage, offset, shape, (1,), False, OrderedDict())
        torch.save(Calls(torch._utils._rebuild_tensor_v2, *tensor), tmp_path / "x.pt")
        with pytest.raises(NotData, match="a size that none has"):
            read_torch_file(tmp_path / "x.pt")
    torch.save(torch.ones(10_000), tmp_path / "y.pt")
    content = (tmp_path / "y.pt").read_bytes()
    (tmp_path / "y.pt").write_bytes(content[:20_000] + content[30_000:])
    with pytest.raises(DamagedFile):
        read_torch_file(tmp_path / "y.pt").read()


def test_a_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    """By the CRC-32 of the archive, which torch.load itself does not compare."""
    path, value = tmp_path / "x.pt", torch.arange(1000.0)
    torch.save([value, value[5:]], path)
    content = bytearray(path.read_bytes())
    content[content.find(value.numpy().tobytes()) + 2002] ^= 16
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)[0], value)
    for tensor in read_torch_file(path):
        with pytest.raises(
            DamagedFile, match=r"x\.pt: damaged between bytes \d+ and \d+: its CRC-32 differs"
        ):
            tensor.read()


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    path, value = tmp_path / "x.pt", torch.arange(1000.0)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:  # as with set_crc32_options(False)
        torch.save(value, tmp_path / "y.pt")
        with zipfile.ZipFile(tmp_path / "y.pt") as other:
            for info in other.infolist():
                archive.writestr(info.filename, other.read(info))
    content = path.read_bytes()
    crc = zlib.crc32(value.numpy().tobytes()).to_bytes(4, "little")
    assert content.count(crc) == 2
    path.write_bytes(content.replace(crc, bytes(4)))
    assert torch.equal(read_torch_file(path).read(), value)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}) * 1000)
    with pytest.raises(DamagedFile, match="its entries are compressed"):
        read_torch_file(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}))
        archive.writestr("x/byteorder", b"big")
    with pytest.raises(NotData, match="big-endian"):
        read_torch_file(tmp_path / "x.pt")
    torch.save({}, tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFile, match=r"save it with torch 1\.6 or later"):
        read_torch_file(tmp_path / "y.pt")
    for value in (5, [1], {1}):
        torch.save(value, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises(ValueError, match=r"model_states\.pt: holds no dictionary; copy it again"):
            read_zero(tmp_path)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_change_no_value_and_end_in_no_other_error(changes: list[tuple[int, int]]) -> None:
    """What loads, as after a change of the bytes between two entries, is what was saved."""
    value = {"model": {"a": torch.ones(2), "b": [1, {"c": (2, 3)}]}, "args": OrderedDict(x=torch.Size([1]))}
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"foreign_{os.getpid()}.pt"
    torch.save(value, path)
    content = bytearray(path.read_bytes())
    for place, byte in changes:
        content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        found = read_torch_file(path)
        assert torch.equal(found["model"].pop("a").read(), torch.ones(2))
        assert found == {"model": {"b": [1, {"c": (2, 3)}]}, "args": {"x": (1,)}}
    except (NotData, DamagedFile):
        pass
    finally:
        path.unlink()


def shared(make: Callable[[Any], Any] = lambda part: [part, part]) -> Any:
    """A value that shares its parts: it has 2^60 paths, which nobody may show."""
    value: Any = make(0)
    for _ in range(60):
        value = make(value)
    return value


ARGS = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
WEIGHTS = {
    f"decoder.layers.0.{part}": torch.zeros(1)
    for part in ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
}
LAST = {"decoder.layers.9999.self_attention.linear_qkv.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("args", "state", "said"),
    [
        ({"window_size": shared()}, {}, "describe no model of ours: --window-size of several"),
        ({"num_experts": shared()}, {}, "its model has num_experts of several values"),
        ({"rotary_base": shared(), "position_embedding_type": "rope"}, {}, "rotary_base of several values"),
        ({}, {"checkpoint_version": shared()}, "checkpoint_version of several values; load and save"),
        ({"num_layers": 1 << 40}, {}, "--num-layers 1099511627776: must be at most 10000"),
        ({"num_layers": 1000}, {}, "its args say 1000 layers, and it does not have the last of them"),
        ({"hidden_size": 1 << 20}, {}, "its args ask for one of shape (8, 1048576)"),
        ({"num_layers": 10_000}, {"model": LAST}, "its args say 10000 layers, and it has 1 tensors"),
        ({"ffn_hidden_size": 1 << 62}, {}, "its args describe"),
        ({}, {"model": shared(lambda part: {"a": part, "b": part})}, "in each other to more than 200,000"),
        ({}, {"model": shared()}, "has no model"),
        ({}, {"iteration": shared()}, "has no embedding.positions.weight"),
        ({"window_size": [3, 0], "spec": [], "num_experts": [1]}, {}, "has no embedding.positions.weight"),
        ({}, {"model": Calls(os.system, "true")}, "names posix.system, which is code"),
    ],
)  # fmt: skip
def test_a_model_that_is_none_is_refused_by_name(
    tmp_path: Path, tool: Tool, args: dict[str, Any], state: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "old/iter_0000007/mp_rank_00"
    folder.mkdir(parents=True)
    whole = {"model": WEIGHTS, "checkpoint_version": 3.0, "args": Namespace(**ARGS | args)} | state
    torch.save(whole, folder / "model_optim_rng.pt")
    error = refusal(tool, tmp_path / "old", tmp_path / "new")
    assert said in error
    assert len(error) < 600
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([dict.fromkeys(map(str, range(1000)), (1,))] * 1000, "have more than 200,000 names"),
        ([{"a": (1,) * 65}], "param_shapes has a tensor of no shape, or of more than 64 dimensions; copy"),
        ([{"a": 3}], "has a tensor of no shape"),
        ([{"a": (1 << 60,)}], "param_shapes has a tensor with a size that none has"),
        ([{"a": (-1,)}], "a size that none has"),
        ([{"a": shared()}], "a size that none has"),
    ],
)
def test_shapes_of_deepspeed_are_bounded(tmp_path: Path, groups: list[Any], said: str) -> None:
    torch.save({"param_shapes": groups}, tmp_path / "mp_rank_00_model_states.pt")
    flat = {"optimizer_state_dict": {"zero_stage": 1, "single_partition_of_fp32_groups": []}}
    torch.save(flat, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=said):
        read_zero(tmp_path)
