"""The tokenizer beside a model: written so that AutoTokenizer gives our ids, found where one is imported."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.storage.files import write_durably
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.files import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG

_VOCAB, _MERGES = "vocab.json", "merges.txt"

TEXTS = (
    "Hello, world! It's 2024; we'll see.",
    "def f(x):\n\treturn  x ** 2   # naïve\r\n",
    "   leading and trailing   ",
    "日本語 и русский, e\u0301 and 😀👩‍👩‍👧 ﬁ Ⅷ １２",
    "",
    "a\u00a0b\u2028c\x00d\u200b\ufeff e\x85",
    "\n".join(letter * count for letter in " \n\t=-#*.0xa" for count in range(1, 34)),
)


def find_tokenizer(named: NamedDirectory) -> TokenizerConfig:
    """The settings of the tokenizer that lies beside the model."""
    if (named.path / TOKENIZER).exists():
        model = named.shown if named.is_on_hub else str(named.path)
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
    vocab, merges = named.path / _VOCAB, named.path / _MERGES
    if vocab.exists() and merges.exists():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges)
        )
    raise named.error(
        f"holds neither {TOKENIZER} nor {_VOCAB} with {_MERGES}; give the --tokenizer-type of its model"
    )


def other_ids(named: NamedDirectory, given: Tokenizer) -> tuple[str, ...]:
    """A line if the tokenizer beside the model, where there is one, has other ids than the `given` one."""
    ordinary = TEXTS[:2]
    try:
        pairs = zip(
            given.encode_batch(ordinary),
            build_tokenizer(find_tokenizer(named)).encode_batch(ordinary),
            strict=True,
        )
    except ValueError:  # there is none that can be read, or text of the given one is ids
        return ()
    if all(ours == theirs for ours, theirs in pairs):
        return ()
    fix = f"the tokenizer in {named.shown}, whose ids the weights were trained on; omit it to take that one"
    return (f"--tokenizer-type {given.kind}: has other ids than {fix}",)


def write_tokenizer(
    named: NamedDirectory, tokenizer: Tokenizer, config: TokenizerConfig, directory: Path, longest: int
) -> str:
    """Write the files that AutoTokenizer reads, and return a line about them.

    `longest` is the model's length in tokens. Raises ValueError, naming `named`, when some text would get
    other ids from them.
    """
    from tokenizers import Tokenizer as Pipeline

    try:
        written = tokenizer.to_tokenizers()
    except ValueError as error:
        raise _cannot(named, tokenizer, str(error)) from None
    if written is None:
        return f"no tokenizer is written: the text of a {tokenizer.kind} is ids"
    pipeline = Pipeline.from_str(written)
    write_durably(directory / TOKENIZER, written.encode())
    of_gpt2 = config.tokenizer_type == "GPT2BPETokenizer"
    for name in (_VOCAB, _MERGES) if of_gpt2 else ():
        write_durably(directory / name, tokenizer.files[name])
    end = pipeline.id_to_token(tokenizer.eod)
    special = {"bos_token": end, "eos_token": end} | ({"unk_token": end} if of_gpt2 else {})
    settings = special | {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "tokenizer_class": "GPT2Tokenizer" if of_gpt2 else "PreTrainedTokenizerFast",
    }
    _write_json(directory / TOKENIZER_CONFIG, settings)
    _write_json(directory / SPECIAL_TOKENS_MAP, special)
    texts = check_texts(tokenizer, pipeline)
    encoded = [encoding.ids for encoding in pipeline.encode_batch(texts, add_special_tokens=False)]
    _check_ids(named, tokenizer, texts, encoded)
    return (
        f"tokenizer: {tokenizer.kind} of {tokenizer.vocab_size} entries, the same ids on {len(texts)} texts"
    )


def check_auto_tokenizer(named: NamedDirectory, tokenizer: Tokenizer, directory: Path) -> None:
    """Raise ValueError when transformers' AutoTokenizer gives other ids, if both are there."""
    if find_spec("transformers") is None or not (directory / TOKENIZER).exists():
        return
    from tokenizers import Tokenizer as Pipeline
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    texts = check_texts(tokenizer, Pipeline.from_file(str(directory / TOKENIZER)))
    encoded = [theirs.encode(text, add_special_tokens=False) for text in texts]
    _check_ids(named, tokenizer, texts, encoded)
    if theirs.eos_token_id != tokenizer.eod:
        raise _cannot(
            named, tokenizer, f"AutoTokenizer ends a text with {theirs.eos_token_id}, not {tokenizer.eod}"
        )


def check_texts(tokenizer: Tokenizer, pipeline: Any) -> list[str]:
    """Awkward texts, and every entry of the vocabulary between others; none that spells a special token."""
    special = [token.content for token in pipeline.get_added_tokens_decoder().values() if token.special]
    pieces = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size) if index != tokenizer.eod]
    together = ["".join(pieces[start : start + 64]) for start in range(0, len(pieces), 64)]
    return [text for text in (*TEXTS, *together) if not any(token in text for token in special)]


def _check_ids(
    named: NamedDirectory, tokenizer: Tokenizer, texts: list[str], encoded: list[list[int]]
) -> None:
    for ours, theirs in zip(tokenizer.encode_batch(texts), encoded, strict=True):
        if ours != theirs:
            at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            near = tokenizer.decode(ours[max(0, at - 2) : at + 4])
            raise _cannot(named, tokenizer, f"near {near!r} ids differ")


def _cannot(named: NamedDirectory, tokenizer: Tokenizer, problem: str) -> ValueError:
    return named.error(
        f"its {tokenizer.kind} cannot be written for transformers: {problem}; --no-tokenizer omits it"
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_durably(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
