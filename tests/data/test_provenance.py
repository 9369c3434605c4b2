"""Data of another tokenizer is an error; data without a record is accepted."""

import re

import pytest

from megatron_zpp.data.provenance import check_provenance, write_provenance
from tests.support import refusal

OURS = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": 50257, "eod": 50256, "fingerprint": "a" * 64}


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 32000), ("fingerprint", "b" * 64)])
def test_any_difference_names_both_sides(tmp_path, key, value):
    write_provenance(tmp_path / "x", OURS | {key: value})
    message = refusal(check_provenance, tmp_path / "x", OURS)
    assert re.search(r"x\.tokenizer\.json: .*--tokenizer-type", message)
    assert f"{key} {value}"[:24] in message
    assert f"{key} {OURS[key]}"[:24] in message
    assert "a" * 13 not in message  # twelve digits tell fingerprints apart


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b'{"vocab_size": 3}'])
def test_an_invalid_record_has_another_error_than_a_difference(tmp_path, content):
    (tmp_path / "x.tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.tokenizer\.json: no.*preprocess the data again"):
        check_provenance(tmp_path / "x", OURS)
