"""A SentencePiece model as a pipeline of `tokenizers`, against SentencePiece itself."""

import io
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_zpp.tokenizer.sentencepiece_pipeline import to_pipeline
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece

SOURCE = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
SPECIAL = ("<unk>", "<s>", "</s>", "▁")  # the last is how SentencePiece writes a space
TEXTS = st.one_of(
    st.text(),
    st.text(" \t\n\rab=0"),
    st.lists(st.sampled_from([*SOURCE[:4000].split(), " ", "  ", "\n", "\n\n", "\t"])).map("".join),
)


def trained(**settings: object) -> bytes:
    """As SentencePiece trains one unless told otherwise, or as Llama's was."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.split("\n")),
        model_writer=model,
        vocab_size=600,
        minloglevel=3,
        **settings,
    )
    return model.getvalue()


def both(content: bytes) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    theirs = sentencepiece.SentencePieceProcessor()
    theirs.LoadFromSerializedProto(content)
    return theirs, Tokenizer.from_str(to_pipeline(content))


@pytest.fixture(scope="module", params=["ours", "default", "llama"])
def bpe(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    if request.param == "ours":
        return both(train_sentencepiece([SOURCE], 600, "bpe"))
    if request.param == "default":
        return both(trained(model_type="bpe"))
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return both(trained(model_type="bpe", byte_fallback=True, split_digits=True, **kept))


@given(text=TEXTS)
def test_bpe_gives_the_same_ids(
    bpe: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    assume(not any(special in text for special in SPECIAL))
    theirs, pipeline = bpe
    assert pipeline.encode(text, add_special_tokens=False).ids == theirs.encode(text)


def test_bpe_decodes_to_the_same_text(bpe: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    theirs, pipeline = bpe
    known = [ids for ids in theirs.encode(SOURCE.split("\n")) if theirs.unk_id() not in ids]
    assert len(known) > 50
    assert pipeline.decode_batch(known, skip_special_tokens=False) == theirs.decode(known)


@pytest.mark.parametrize("settings", [{}, {"byte_fallback": True}], ids=["unigram", "with bytes"])
def test_unigram_gives_the_same_ids_on_lines(settings: dict[str, bool]) -> None:
    theirs, pipeline = both(trained(model_type="unigram", **settings))
    lines = [line for line in SOURCE.split("\n") if "==" not in line and "----" not in line]
    assert [encoding.ids for encoding in pipeline.encode_batch(lines)] == theirs.encode(lines)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="only bpe and unigram"):
        to_pipeline(trained(model_type="char", hard_vocab_limit=False))
