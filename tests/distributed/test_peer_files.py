"""Files between ranks: real servers and connections on this machine."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_zpp.memory_snapshots.peer_files import FileServer, Peer, TransferFailed, get_file, put_file

NAME = "iter_0000040-1a2b3c4d/rank_00003.safetensors"
INTERFACES = Path("/proc/net/if_inet6")
SECRET = "of this run"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    def find(name: str) -> Path | None:
        return directory / name if (directory / name).exists() else None

    server = FileServer(SECRET, directory, find)
    yield Peer("127.0.0.1", server.port, SECRET)
    server.close()


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_a_file_arrives_as_it_was_sent(peer: Peer, directory: Path, tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "sent").write_bytes(content[:size])
    put_file(peer, tmp_path / "sent", NAME)
    assert (directory / NAME).read_bytes() == content[:size]
    get_file(peer, NAME, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content[:size]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_that_arrives_reports_progress(peer: Peer, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(bytes(3_000_001))
    put_file(peer, tmp_path / "sent", NAME)
    reports = []
    get_file(peer, NAME, tmp_path / "back", lambda: reports.append(None))
    assert len(reports) >= 3


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost", "::1"])
def test_a_server_is_reached_at_every_address(peer: Peer, directory: Path, tmp_path: Path, host: str) -> None:
    if host == "::1" and not (INTERFACES.exists() and " lo\n" in INTERFACES.read_text()):
        pytest.skip("needs IPv6")
    (tmp_path / "sent").write_bytes(b"x")
    put_file(peer._replace(host=host), tmp_path / "sent", NAME)
    assert (directory / NAME).read_bytes() == b"x"


def test_a_stranger_gets_no_answer(peer: Peer, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(b"x")
    with pytest.raises(TransferFailed):
        put_file(peer._replace(secret="another"), tmp_path / "sent", NAME)
    assert not directory.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", f"{NAME}/..", "iter_0000040-1a2b3c4d/lock"])
def test_no_other_name_is_written_or_read(peer: Peer, directory: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "sent").write_bytes(b"x")
    for transfer in (
        lambda: put_file(peer, tmp_path / "sent", name),
        lambda: get_file(peer, name, tmp_path / "back"),
    ):
        with pytest.raises(TransferFailed, match="is not a name of a copy"):
            transfer()
    assert [path.name for path in tmp_path.iterdir()] == ["sent"]


def test_a_file_that_is_cut_off_gets_no_name(peer: Peer, directory: Path) -> None:
    request = {"secret": SECRET, "put": NAME, "bytes": 100}
    with socket.create_connection((peer.host, peer.port)) as connection:
        connection.sendall(json.dumps(request).encode() + b"\nhalf")
        connection.shutdown(socket.SHUT_WR)
        assert "was cut off" in json.loads(connection.recv(1000))["problem"]
    assert [path.name for path in (directory / NAME).parent.iterdir()] == []


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\n", b"GET / HTTP/1.1\r\n", b"[]\n", b"{" * 5000, b'{"secret": 1}\n', b"\xff\n"),
        *(b"[" * 4000 + b"\n", b'{"secret": "\\ud800"}\n'),
    ],
)
def test_what_is_no_request_changes_nothing(peer: Peer, directory: Path, line: bytes) -> None:
    with socket.create_connection((peer.host, peer.port)) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    assert not directory.exists()


def test_a_file_that_is_not_there_and_a_server_that_is_gone(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match="is not there"):
        get_file(peer, NAME, tmp_path / "back")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransferFailed, match=f"127.0.0.1:{port}: Connection refused"):
        get_file(peer._replace(port=port), NAME, tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_server_writes_nothing_more(directory: Path) -> None:
    """Even where a transfer is under way."""
    server = FileServer(SECRET, directory, lambda name: None)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        request = {"secret": SECRET, "put": NAME, "bytes": 100}
        connection.sendall(json.dumps(request).encode() + b"\nhalf")
        while not directory.exists():
            pass
        server.close()
    assert [path.name for path in (directory / NAME).parent.iterdir()] == []
