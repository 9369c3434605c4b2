"""The reader of indexed files: files written by hand, and damaged in every way."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.indexed import (
    IndexedDataset,
    check_document_indices,
    check_lengths_and_pointers,
    token_dtype,
)
from tests.data.format_by_hand import write_by_hand
from tests.support import refusal

SEQUENCES = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13]]
LENGTHS_AT, POINTERS_AT, DOCUMENTS_AT = 34, 34 + 4 * 4, 34 + 12 * 4


def patch(path, offset, content):
    data = bytearray(Path(path).read_bytes())
    data[offset : offset + len(content)] = content
    Path(path).write_bytes(data)


def test_the_identifier_in_checkpoints_is_of_both_ends(by_hand):
    """Of 2^14 lengths and 64 KiB of tokens. If they changed, runs would not know their data again."""
    sequences = [[number % 251] * (1 + number % 3) for number in range(40_000)]
    data = IndexedDataset(by_hand("x", sequences, kind="i", documents=[0, 40_000]))
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    tokens = np.concatenate(sequences).astype("<i4")
    digest = hashlib.sha256(f"40000 {len(tokens)} int32".encode())
    for ends, count in ((lengths, 2**14), (tokens, 2**14)):
        digest.update(ends[:count].tobytes() + ends[-count:].tobytes())
    assert data.fingerprint() == digest.hexdigest()[:32]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip("BbhiqH", ["u1", "i1", "i2", "i4", "i8", "u2"], strict=True)]
)
def test_reads_every_integer_type(by_hand, kind, dtype):
    data = IndexedDataset(by_hand("x", SEQUENCES, kind=kind, documents=[0, 2, 2, 4]))
    assert data.dtype == np.dtype("<" + dtype)
    assert data.tokens.dtype == data.dtype
    assert data.tokens[:].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert data.lengths[:].tolist() == [3, 0, 1, 5]
    assert data.pointers[:].tolist() == [n * data.dtype.itemsize for n in (0, 3, 3, 4)]
    assert data.document_indices[:].tolist() == [0, 2, 2, 4]
    assert (data.num_sequences, data.num_documents, data.num_tokens) == (4, 3, 9)
    assert [part.tolist() for part in data.token_ranges(np.arange(4))] == [[0, 3, 3, 4], [3, 3, 4, 9]]
    with pytest.raises(IndexError, match="rows 4 to 5 of 5"):
        data.token_ranges(np.array([4]))


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_either_file_names_the_data_set(by_hand, suffix):
    prefix = by_hand("x", SEQUENCES)
    assert IndexedDataset(prefix + suffix).prefix == prefix


@pytest.mark.parametrize(
    ("offset", "content", "expected"),
    [
        (0, b"TNTIDX\0\0\0", "byte 0: found b'TNTIDX"),
        (9, b"\2", "byte 9: version 2"),
        (17, b"\x09", "byte 17: dtype code 9"),
        (17, b"\x06", "byte 17: dtype code 6 is not an integer type"),
        (18, b"\5", "truncated at byte 122: 122 bytes found, 134 needed"),
        (26, b"\4", "longer than it should be at byte 114"),
        (LENGTHS_AT + 4, b"\xff\xff\xff\xff", f"byte {LENGTHS_AT + 4}: sequence 1 has length -1"),
        (LENGTHS_AT, b"\4", f"byte {POINTERS_AT + 8}: sequence 1 points at byte 6 of the .bin"),
        (POINTERS_AT + 16, b"\7", f"byte {POINTERS_AT + 16}: sequence 2 points at byte 7"),
        (DOCUMENTS_AT, b"\1", f"byte {DOCUMENTS_AT}: document 0 begins at sequence 1"),
        (DOCUMENTS_AT + 8, b"\3", f"byte {DOCUMENTS_AT + 16}: document index 2 is 2, below the 3"),
        (
            DOCUMENTS_AT + 32,
            b"\5",
            f"byte {DOCUMENTS_AT + 32}: the last document ends at sequence 5; there are 4",
        ),
    ],
)
def test_damage_is_reported_with_its_offset(by_hand, offset, content, expected):
    prefix = by_hand("x", SEQUENCES)
    patch(f"{prefix}.idx", offset, content)
    message = refusal(IndexedDataset, prefix)
    assert message.startswith(f"{prefix}.idx: ")
    assert expected in message


@pytest.mark.parametrize("change", [-1, 1])
def test_bin_of_another_size(by_hand, change):
    prefix = by_hand("x", SEQUENCES)
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes((content + b"\0")[: len(content) + change])
    assert f"{prefix}.bin: " in (message := refusal(IndexedDataset, prefix))
    assert f"{18 + change} bytes found, 18 needed for the 9 uint16 tokens" in message


def test_no_tokens_or_indices_at_all(by_hand):
    prefix = by_hand("x", SEQUENCES, documents=[])
    assert "byte 26: 0 document indices" in refusal(IndexedDataset, prefix)
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\0\0")
    assert refusal(IndexedDataset, prefix).startswith(f"{prefix}.idx: truncated at byte 9")
    for name, sequences in (("none", []), ("hollow", [[], []])):
        prefix = by_hand(name, sequences)
        assert f"{prefix}.bin: the file is empty" in refusal(IndexedDataset, prefix)


@pytest.mark.parametrize("at", [0, (1 << 20) - 1, 1 << 20, (5 << 19) - 1])
def test_checks_find_one_wrong_entry_in_any_chunk(at):
    lengths = np.full(5 << 19, 3, np.int32)
    pointers = np.arange(5 << 19, dtype=np.int64) * 6
    assert check_lengths_and_pointers("f", lengths, pointers, 2) == 3 * (5 << 19)
    pointers[at] += 1
    place = 34 + 4 * (5 << 19) + 8 * at
    with pytest.raises(ValueError, match=rf"^f: byte {place}: sequence {at} points at byte {6 * at + 1} "):
        check_lengths_and_pointers("f", lengths, pointers, 2)
    lengths[at] = -2
    with pytest.raises(ValueError, match=rf"^f: byte {34 + 4 * at}: sequence {at} has length -2"):
        check_lengths_and_pointers("f", lengths, pointers, 2)


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=8), st.integers(0, 6))
def test_document_indices_rise_from_zero_to_the_end(indices, sequences):
    right = indices[0] == 0 and indices[-1] == sequences and sorted(indices) == indices
    try:
        check_document_indices("f", np.array(indices), sequences)
    except ValueError:
        assert not right
    else:
        assert right


@pytest.mark.parametrize("at", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_document_indices_fall_anywhere_near_the_end_of_a_chunk(at):
    indices = np.arange((1 << 20) + 3)
    indices[at] = 7
    place = 34 + 12 * ((1 << 20) + 2) + 8 * at
    with pytest.raises(ValueError, match=f"byte {place}: document index {at} is 7"):
        check_document_indices("f", indices, (1 << 20) + 2)


def test_opening_does_not_read_the_tokens(tmp_path):
    """A sparse .bin of 64 GiB opens at once."""
    size = 2**30
    write_by_hand(tmp_path / "x", [[0]] * 32)
    patch(tmp_path / "x.idx", 34, np.full(32, size, "<i4").tobytes())
    patch(tmp_path / "x.idx", 34 + 4 * 32, (np.arange(32, dtype="<i8") * size * 2).tobytes())
    os.truncate(tmp_path / "x.bin", 32 * size * 2)
    data = IndexedDataset(tmp_path / "x")
    assert (data.num_tokens, data.tokens[-1]) == (32 * size, 0)


def test_token_dtype_follows_the_vocabulary():
    assert token_dtype(65_499) == np.dtype("<u2")
    assert token_dtype(65_500) == np.dtype("<i4")
