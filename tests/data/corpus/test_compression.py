"""Compressed files as other programs write them: padded, of several members, or with a long window."""

import gzip
import io
from pathlib import Path

import pytest
import zstandard

from megatron_zpp.data.corpus.compression import decompressed
from tests.data.text.conftest import EOD, documents_of, opened, with_ends


def contents(content: bytes, name: str, size: int) -> bytes:
    return b"".join(decompressed(io.BytesIO(content), name, size))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_zero_bytes_behind_a_member_are_padding(size: int) -> None:
    """As `gzip` and Python read them."""
    content = gzip.compress(b"one\n") + bytes(100) + gzip.compress(b"two\n") + bytes(512)
    assert gzip.decompress(content) == contents(content, "x.gz", size) == b"one\ntwo\n"
    for damaged in (bytes(100), bytes(9) + content, content + b"x", gzip.compress(b"one\n")[:-4] + bytes(20)):
        with pytest.raises(ValueError, match=r"^x\.gz: the .* create it again$"):
            contents(damaged, "x.gz", size)
    with pytest.raises(ValueError, match=r"^x\.zst: the compressed data is damaged"):
        contents(zstandard.compress(b"one\n") + bytes(512), "x.zst", size)


def with_window(frame: bytes, log: int) -> bytes:
    """Return a frame of unknown size with a window of 2^`log` bytes in its header (RFC 8878)."""
    assert frame[4] & 0b0010_0000 == 0, "a frame of a single segment has no window"
    return frame[:5] + bytes([(log - 10) << 3]) + frame[6:]


@pytest.mark.parametrize("log", [28, 31])
def test_a_long_window_of_zstd_is_read(tmp_path: Path, log: int) -> None:
    """As `zstd --long=31` writes it; also as a shard."""
    compressor = zstandard.ZstdCompressor().compressobj()
    frame = compressor.compress(b'{"text": "1 2"}\n' * 9) + compressor.flush()
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(with_window(frame, log))
    assert contents(path.read_bytes(), "x.zst", 1 << 20) == b'{"text": "1 2"}\n' * 9
    text = opened(str(tmp_path / "*.jsonl.zst"), append_eod=True)
    assert documents_of(text, EOD) == with_ends([[1, 2]] * 9)
