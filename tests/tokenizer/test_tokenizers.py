"""Every tokenizer type: parity with outside implementations, and what its files may get wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer, describe
from megatron_zpp.train.inputs import check_prompts
from tests.support import refusal

ORDINARY = [
    "Hello, world! It's 2024; we'll see.",
    "def f(x):\n\treturn  x ** 2   # naïve\r\n",
    "   leading and trailing   ",
    "日本語 и русский, e\u0301 and 😀👩‍👩‍👧",
    "",
    "\n\n\n",
    "a\u00a0b\u2028c\x00d",
]


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vocab.json, merges.txt and tokenizer.json of one small byte-level BPE."""
    from tokenizers import Tokenizer as Pipeline

    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(directory, ORDINARY * 20 + [Path(__file__).read_text()])
    pipeline = Pipeline.from_file(str(directory / "tokenizer.json"))
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=4)
    pipeline.save(str(directory / "tokenizer.json"))
    return directory


def gpt2(directory: Path) -> Tokenizer:
    files = {"vocab_file": str(directory / "vocab.json"), "merge_file": str(directory / "merges.txt")}
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files))


def hugging_face(path: Path) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))


def sentencepiece(path: Path) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))
    )


def test_gpt2_encodes_as_transformers_does(bpe_files: Path) -> None:
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer(str(bpe_files / "vocab.json"), str(bpe_files / "merges.txt"))
    ours = gpt2(bpe_files)
    assert ours.encode_batch(ORDINARY) == [theirs.encode(text) for text in ORDINARY]
    assert ours.eod == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


def test_hugging_face_encodes_the_same_pipeline_the_same(bpe_files: Path) -> None:
    """The file was saved with truncation and padding to 4 tokens: neither may reach a data set."""
    ours = hugging_face(bpe_files)
    assert ours.encode_batch(ORDINARY) == gpt2(bpe_files).encode_batch(ORDINARY)
    assert ours.eod == gpt2(bpe_files).eod


@pytest.mark.parametrize("build", [gpt2, hugging_face])
def test_an_end_of_document_spelt_out_is_text(bpe_files: Path, build) -> None:
    tokenizer = build(bpe_files)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def pipelines() -> dict[str, dict[str, Any]]:
    """Models that know `</s>` as a piece, which whole words are, or a sequence of merges makes."""
    words = {"<unk>": 0, "</s>": 1, "the": 2, "<": 3, "/": 4, "s": 5, ">": 6, "</": 7, "</s": 8}
    added = [
        {"id": id, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, id in (("<unk>", 0), ("</s>", 1))
    ]
    shared = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    shared |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    merges = [["<", "/"], ["</", "s"], ["</s", ">"]]
    bpe = {"type": "BPE", "vocab": words, "unk_token": "<unk>"}
    models = {
        "Unigram": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[word, -1.0 - id] for word, id in words.items()],
        },
        "WordLevel": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        "WordPiece": {
            **{"type": "WordPiece", "vocab": words, "unk_token": "<unk>"},
            **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        },
        "BPE": bpe | {"merges": merges},
        "BPE of strings": bpe | {"merges": [" ".join(pair) for pair in merges]},
        "ignore_merges": bpe | {"merges": merges[:1], "ignore_merges": True},
    }
    return {name: shared | {"model": model} for name, model in models.items()}


@pytest.mark.parametrize("kind", pipelines())
def test_an_end_of_document_that_is_a_piece_cannot_be_spelt(tmp_path: Path, kind: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipelines()[kind]))
    tokenizer = hugging_face(tmp_path)
    assert tokenizer.eod == 1
    assert 1 not in tokenizer.encode("the </s> the")
    assert tokenizer.encode("the </s> the")[0] == tokenizer.encode("the")[0]
    assert tokenizer.decode([tokenizer.eod]) == "</s>"
    assert tokenizer.vocab_size == 9


def test_an_eos_token_of_the_special_tokens_map_counts(bpe_files: Path, tmp_path: Path) -> None:
    """transformers 4 writes it there; the token for padding is another one."""
    from transformers import PreTrainedTokenizerFast

    parts = json.loads((bpe_files / "tokenizer.json").read_text())
    end = dict(parts["added_tokens"][0]) | {"content": "<|im_end|>", "id": len(parts["model"]["vocab"])}
    parts["added_tokens"].append(end)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = hugging_face(tmp_path)
    assert tokenizer.eod == PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).eos_token_id
    assert tokenizer.files.keys() == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    with pytest.raises(ValueError, match=r"two ends of document, .* and .*; name the same eos_token in both"):
        hugging_face(tmp_path)


def test_an_unk_token_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    parts = pipelines()["WordLevel"]
    parts["model"]["unk_token"] = "<missing>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=r"names the unk_token '<missing>', which its vocabulary lacks"):
        hugging_face(tmp_path)


@given(st.text())
def test_byte_level_round_trip(bpe_files: Path, text: str) -> None:
    tokenizer = gpt2(bpe_files)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < tokenizer.vocab_size for index in ids)


def test_fingerprint_is_of_contents(bpe_files: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (tmp_path / name).write_bytes((bpe_files / name).read_bytes())
    assert describe(gpt2(tmp_path)) == describe(gpt2(bpe_files))
    content = (bpe_files / "merges.txt").read_bytes()
    (tmp_path / "merges.txt").write_bytes(content.replace(b"\n", b"\r\n"))  # as Windows ends lines
    assert describe(gpt2(tmp_path)) == describe(gpt2(bpe_files))
    assert describe(hugging_face(tmp_path / "tokenizer.json")) == describe(hugging_face(bpe_files))
    merges = (tmp_path / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(merges[:-1]) + "\n")
    assert gpt2(tmp_path).fingerprint != gpt2(bpe_files).fingerprint


@pytest.mark.parametrize("eos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_hugging_face_takes_the_eos_of_its_config(bpe_files: Path, tmp_path: Path, eos) -> None:
    parts = json.loads((bpe_files / "tokenizer.json").read_text())
    top = max(parts["model"]["vocab"].values())
    parts["model"]["vocab"]["<s>"] = top + 41  # ids may have holes
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = hugging_face(tmp_path)
    assert tokenizer.eod == top + 41
    assert tokenizer.vocab_size == top + 42


def test_a_panic_inside_tokenizers_is_an_error(bpe_files: Path, tmp_path: Path) -> None:
    """Of a merge that the vocabulary lacks; a later release may have another error for it."""
    parts = json.loads((bpe_files / "tokenizer.json").read_text())
    parts["model"]["merges"].append(["a", "<|endoftext|>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=r"^--tokenizer-model .*`tokenizers` cannot load it \("):
        hugging_face(tmp_path)


def test_hugging_face_without_an_end_of_document(bpe_files: Path, tmp_path: Path) -> None:
    parts = json.loads((bpe_files / "tokenizer.json").read_text())
    vocab = parts["model"]["vocab"]
    vocab["</s>"] = len(vocab)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=r"several possible ends of document: name an eos_token in"):
        hugging_face(tmp_path)
    parts["added_tokens"] = []
    del vocab["<|endoftext|>"], vocab["</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=r"^--tokenizer-model .*no end of document: name an eos_token"):
        hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    with pytest.raises(ValueError, match=r"lacks '<gone>'"):
        hugging_face(tmp_path)


GARBAGE = [None, b"", b"garbage", b"{}", b"[]", b'{"a": "b"}', b"\xff\xfe\x00", b"1 2 3\n"]


@pytest.mark.parametrize("content", GARBAGE)
@pytest.mark.parametrize(
    ("flag", "name", "build"),
    [
        ("--vocab-file", "vocab.json", lambda directory: gpt2(directory)),
        ("--merge-file", "merges.txt", lambda directory: gpt2(directory)),
        ("--tokenizer-model", "tokenizer.json", lambda directory: hugging_face(directory)),
        ("--tokenizer-model", "t.model", lambda directory: sentencepiece(directory / "t.model")),
    ],
)
def test_garbage_files(bpe_files: Path, tmp_path: Path, flag, name, build, content) -> None:
    """One line that begins with the flag and the file; None is a file that is not there."""
    for other in ("vocab.json", "merges.txt"):
        (tmp_path / other).write_bytes((bpe_files / other).read_bytes())
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    assert refusal(build, tmp_path).startswith(f"{flag} {path}: ")


def train_sentencepiece(path: Path, *texts: str, **more: Any) -> Path:
    import sentencepiece as library

    with path.open("wb") as model:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(texts or ["some words to train on"]),
            model_writer=model,
            hard_vocab_limit=False,
            minloglevel=3,
            **{"vocab_size": 20} | more,
        )
    return path


def test_sentencepiece_without_end_of_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory"):
        sentencepiece(tmp_path)
    with pytest.raises(ValueError, match="no end-of-sentence piece"):
        sentencepiece(train_sentencepiece(tmp_path / "t.model", eos_id=-1))


@pytest.mark.parametrize("kind", ["gpt2", "hugging_face", "sentencepiece"])
def test_half_a_surrogate_pair_has_no_ids(bpe_files: Path, tmp_path: Path, kind: str) -> None:
    """JSON can spell it, and Python reads an argument that is not UTF-8 as such."""
    if kind == "sentencepiece":
        tokenizer = sentencepiece(train_sentencepiece(tmp_path / "t.model"))
    else:
        tokenizer = gpt2(bpe_files) if kind == "gpt2" else hugging_face(bpe_files)
    for text, lone in (("caf\udce9", "udce9"), ("\ud800", "ud800")):
        said = rf"^holds half a surrogate pair, \\{lone}; give text in UTF-8$"
        with pytest.raises(ValueError, match=said):
            tokenizer.encode(text)
        with pytest.raises(ValueError, match=said):
            tokenizer.encode_batch(["words", text])
    with pytest.raises(ValueError, match=r"^--sample-prompt caf\\udce9: holds half a surrogate pair, "):
        check_prompts(["caf\udce9"], tokenizer)


def test_llama2_is_sentencepiece_without_a_beginning_as_in_megatron(tmp_path: Path) -> None:
    """A model like Llama's, which has <s>. Megatron-LM's own class is the oracle."""
    path = train_sentencepiece(tmp_path / "t.model", *ORDINARY, vocab_size=400, byte_fallback=True)
    ours = build_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(path)))
    assert describe(ours) == describe(sentencepiece(path))
    library_path = "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer"
    theirs = pytest.importorskip(library_path).SentencePieceTokenizer(str(path))
    assert ours.encode_batch(ORDINARY) == [theirs.text_to_ids(text) for text in ORDINARY]
    assert (ours.eod, ours.vocab_size) == (theirs.eos_id, theirs.vocab_size)


def test_null() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert tokenizer.encode(" 0 5\n99 ") == [0, 5, 99]
    assert tokenizer.decode([0, 5, 99]) == "0 5 99"
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    for text in ("100", "-1", "1.5", "word"):
        with pytest.raises(ValueError, match=r"."):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match=r"^--tokenizer-type"):
        build_tokenizer(TokenizerConfig())
    with pytest.raises(ValueError, match="--vocab-size"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=2**31))
