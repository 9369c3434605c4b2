"""Pickles that would run code are refused in one line, and nothing of them runs."""

import os
import pickle
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.checkpoint.foreign.pickled import NotData, read_pickle
from megatron_zpp.checkpoint.foreign.torch_file import read_pickle_file, read_torch_file
from megatron_zpp.storage.checksums import DamagedFile
from tests.checkpoint.foreign.imports import TOKENIZER, run_import
from tests.support import program


class Calls:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


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
    ],
)
def test_broken_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(NotData):
        read_pickle(content, lambda value: value)


def test_the_command_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, marker = tmp_path / "old/iter_0000007/mp_rank_00", tmp_path / "ran"
    folder.mkdir(parents=True)
    torch.save({"model": Calls(os.system, f"touch {marker}")}, folder / "model_optim_rng.pt")
    with pytest.raises(ValueError, match=r"names posix\.system, which is code") as error:
        run_import(monkeypatch, capsys, tmp_path / "old", "--output", tmp_path / "new", *TOKENIZER)
    assert "\n" not in str(error.value)
    assert not marker.exists()
    assert not (tmp_path / "new").exists()


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
    torch.save(value, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    assert found["a"] == value["a"]
    for key in "bcdef":
        assert torch.equal(found[key].read(), value[key].detach())
        assert found[key].read().dtype == value[key].dtype


def test_tensors_larger_than_their_bytes_are_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(1).expand(1 << 40), tmp_path / "x.pt")
    with pytest.raises(NotData, match="longer than its storage"):
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


def test_compressed_and_old_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}) * 1000)
    with pytest.raises(DamagedFile, match="its entries are compressed"):
        read_torch_file(tmp_path / "x.pt")
    torch.save({}, tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFile, match=r"save it with torch 1\.6 or later"):
        read_torch_file(tmp_path / "y.pt")


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


def nested(make: Callable[[Any], Any], times: int = 60) -> Any:
    """A value that shares its parts: it has 2^times paths, and takes some bytes per level."""
    value: Any = make(0)
    for _ in range(times):
        value = make(value)
    return value


SHARED = {
    "lists": nested(lambda part: [part, part]),
    "tuples": nested(lambda part: (part, part)),
    "dictionaries": nested(lambda part: {"a": part, "b": part}),
    "models": {"model": nested(lambda part: {"a": part, "b": part})},
    "modules": {"module": nested(lambda part: {"a": part, "b": part}), "zero_stage": 1},
}


def within(tmp_path: Path, value: Any) -> str:
    """What an import says of a file with this value; it has 20 seconds."""
    directory = tmp_path / "iter_0000001" / "mp_rank_00"
    directory.mkdir(parents=True)
    torch.save(value, directory / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    argv = [tmp_path, *TOKENIZER, "--output", tmp_path / "new"]
    done = program("megatron_zpp.commands.import_checkpoint", *argv, timeout=20)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("kind", SHARED)
def test_values_that_share_parts_end_in_one_line(tmp_path: Path, kind: str) -> None:
    said = within(tmp_path, SHARED[kind])
    assert len(said.splitlines()) == 1
    assert "model_optim_rng.pt: " in said


@pytest.mark.parametrize("kind", ["set", "frozenset", "key"])
def test_nested_tuples_are_no_keys(kind: str) -> None:
    """By hand: making such a key would take for ever here as well."""
    pair = b"K\x00"
    for level in range(50):
        pair += b"q%ch%c\x86" % (level, level)
    ends = {"set": b"\x8f(" + pair + b"\x90", "frozenset": b"(" + pair + b"\x91", "key": b"}" + pair + b"Ns"}
    with pytest.raises(NotData, match="has a nested tuple as a key"):
        read_pickle(b"\x80\x04" + ends[kind] + b".", lambda value: None)


def test_many_empty_lists_end_soon() -> None:
    content = b"\x80\x04](" + b"]" * 4_000_000 + b"e."
    began = time.monotonic()
    with pytest.raises(NotData, match="has more than 7,000,006 opcodes"):
        read_pickle(content, lambda value: None)
    assert time.monotonic() - began < 60
