"""The tokenizer files of an export: what they contain, and when none can be written."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import transformers

from megatron_zpp.checkpoint.huggingface.importing import read_settings
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.checkpoint.huggingface.gpt2 import SOURCE, check_equal, save, tensors, theirs
from tests.model.families import FAMILIES
from tests.support import refusal
from tests.tokenizer.test_tokenizers import ORDINARY


def test_template_and_truncation_of_a_pipeline_are_not_exported(
    tool: Callable[..., str], bpe: Path, good: Path, tmp_path: Path
) -> None:
    """Because the run was trained without either."""
    from tokenizers import Tokenizer, processors

    pipeline = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    end = pipeline.token_to_id("<|endoftext|>")
    pipeline.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", None, [("<|endoftext|>", end)]
    )
    pipeline.enable_truncation(3)
    plain = pipeline.encode(ORDINARY[0], add_special_tokens=False)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tokenizer.json"]
    tool("import", good, tmp_path / "ours", *flags)
    tool("export", tmp_path / "ours", tmp_path / "out")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pipeline.no_truncation()
    assert auto(ORDINARY[0])["input_ids"] == pipeline.encode(ORDINARY[0], add_special_tokens=False).ids
    assert len(plain.ids) == 3


def test_a_tokenizer_with_no_equivalent_in_transformers_is_refused(
    tool: Callable[..., str], tmp_path: Path, bpe: Path
) -> None:
    """A unigram model can split repeated spaces differently at equal score, and the libraries do."""
    model = train_sentencepiece([SOURCE], 500, "unigram")
    (tmp_path / "t.model").write_bytes(model)
    source = save(theirs(bpe, vocab_size=500), bpe, tmp_path / "theirs")
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "t.model"]
    tool("import", source, tmp_path / "ours", *flags)
    said = refusal(tool, "export", tmp_path / "ours", tmp_path / "out")
    assert re.search("cannot be written for transformers: near .* ids differ; --no-tok", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "t.model", "theirs"]
    (tmp_path / "out").mkdir()  # an empty directory is allowed
    tool("export", tmp_path / "ours", tmp_path / "out", "--no-tokenizer")
    check_equal(tensors(tmp_path / "out"), tensors(source))
    assert not (tmp_path / "out/tokenizer.json").exists()


def save_qwen2_tokenizer(directory: Path) -> int:
    """Write a small tokenizer with Qwen2's parts as transformers saves it; return its number of entries."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    pipeline = Tokenizer(models.BPE())
    pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    pipeline.train_from_iterator([*ORDINARY, SOURCE], trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # after all others
    pipeline.add_special_tokens([AddedToken(token, special=True) for token in special])
    pipeline.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return pipeline.get_vocab_size()


def test_a_qwen2_keeps_its_tokenizer(tool: Callable[..., str], tmp_path: Path) -> None:
    """Which normalises texts: here an e with an accent of its own."""
    source = tmp_path / "theirs"
    source.mkdir()
    family = FAMILIES["qwen2"]
    rows = save_qwen2_tokenizer(source) + 59
    type(family)(family.config, family.settings | {"vocab_size": rows}).model().save_pretrained(source)
    tool("import", source, tmp_path / "ours")
    tool("export", tmp_path / "ours", tmp_path / "back")
    check_equal(tensors(tmp_path / "back"), tensors(source))
    before, after = (transformers.AutoTokenizer.from_pretrained(d) for d in (source, tmp_path / "back"))
    for text in (*ORDINARY, "e\u0301t\u00e9 123 <|im_start|>user"):
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after("e\u0301")["input_ids"] == after("\u00e9")["input_ids"]
    assert after.eos_token == "<|im_end|>"


def test_a_tokenizer_with_other_ids_than_that_of_the_model_is_said(
    tool: Callable[..., str], bpe: Path, good: Path, tmp_path: Path
) -> None:
    """The sizes of the two vocabularies do not tell them apart."""
    vocab, merges = bpe / "vocab.json", tmp_path / "merges.txt"
    merges.write_text("".join((bpe / "merges.txt").read_text().splitlines(keepends=True)[:3]))
    said = "--tokenizer-type GPT2BPETokenizer: has other ids than the tokenizer in "
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file"]
    assert f"{said}{good}, whose" in tool("import", good, tmp_path / "ours", *flags, merges)
    for file, expected in ((merges, 1), (bpe / "merges.txt", 0)):
        given = TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(file)
        )
        assert sum(note.startswith(said) for note in read_settings(f"hf:{good}", given).notes) == expected
