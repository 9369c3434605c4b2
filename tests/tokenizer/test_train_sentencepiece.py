"""Training a SentencePiece model: exact round trips, the same bytes each time, errors that help."""

import sysconfig
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_zpp.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece

SOURCE = Path(sysconfig.get_paths()["stdlib"])
PASSAGES = [(SOURCE / name).read_text() for name in ("argparse.py", "json/decoder.py", "ast.py")]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("model") / "t.model"
    path.write_bytes(train_sentencepiece(PASSAGES, 600, request.param))
    return SentencePieceTokenizer(str(path))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@example("\r\n a\r\rb\t\t\tc\n\n\n  ")
@example("<0x0A></s><s><unk>\ue000")
@example("\ufeff\u2028\x00\x1f\x7f\u00a0\ufffd\U0010ffff😀")
def test_round_trip_of_any_text(trained: SentencePieceTokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.eod not in ids
    assert trained.encode_batch([text, "", text]) == [ids, [], ids]


def test_round_trip_of_source_it_was_not_trained_on(trained: SentencePieceTokenizer) -> None:
    assert (trained.vocab_size, trained.eod) == (600, 2)
    assert trained.decode(trained.encode("a\u2581b")) == "a b"  # SentencePiece's own space
    for path in sorted(SOURCE.glob("encodings/*.py"))[:40]:
        text = path.read_bytes().decode("latin-1")
        assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(("vocab_size", "fix"), [(50_000, "at most"), (100, "give more")])
def test_a_size_that_the_text_does_not_allow(vocab_size: int, fix: str, model_type) -> None:
    """The number in the message is one that works."""
    with pytest.raises(ValueError, match=f"^--vocab-size {vocab_size}: .*{fix}") as caught:
        train_sentencepiece(PASSAGES[1:2], vocab_size, model_type)
    advice = int(next(word for word in str(caught.value).replace(";", "").split()[2:] if word.isdigit()))
    train_sentencepiece(PASSAGES[1:2], advice, model_type)


def test_no_text() -> None:
    with pytest.raises(ValueError, match="no text to train on"):
        train_sentencepiece(["\n\n"], 500, "bpe")
