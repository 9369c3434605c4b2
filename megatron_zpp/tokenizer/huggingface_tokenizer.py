"""A tokenizer.json of Hugging Face's `tokenizers`."""

import json
import secrets
from collections.abc import Collection, Iterable
from itertools import takewhile
from operator import itemgetter
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.location import Location, location
from megatron_zpp.tokenizer.base import PipelineTokenizer, fingerprint_of
from megatron_zpp.tokenizer.files import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    parse_json,
    read_bytes,
)

_FLAG = "--tokenizer-model"
_FIX = "give a tokenizer.json, or the directory that holds one"
_CONFIG_FIX = "correct or remove it"
_USUAL_EODS = ("<|endoftext|>", "</s>")
_PARTS_THAT_DECIDE_IDS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class HuggingFaceTokenizer(PipelineTokenizer):
    """Any `tokenizers` pipeline.

    Its end of document is the `eos_token` of the tokenizer_config.json or special_tokens_map.json beside it,
    else the one of `<|endoftext|>` and `</s>` that it has. A post-processor, which adds special tokens around
    a text, only decides `published_begin`. Truncation and padding that a file may have been saved with are
    omitted.
    """

    kind = "HuggingFaceTokenizer"

    def __init__(self, model: str) -> None:
        """`model`: a tokenizer.json or its directory. Raises ValueError when it cannot serve."""
        from tokenizers import Tokenizer as Pipeline

        try:
            path = location(model)
        except ValueError as error:
            raise option_error(_FLAG, model, f"{error}; {_FIX}") from None
        path = path / TOKENIZER if path.is_dir() else path
        content = read_bytes(_FLAG, str(path), _FIX)
        self.files = files = {TOKENIZER: content}
        parts = parse_json(content, _FLAG, str(path), _FIX)
        _check_unknown(parts, path)
        try:
            self._pipeline = Pipeline.from_str(content.decode())
        except BaseException as error:  # `tokenizers` raises nothing more specific, and panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise option_error(_FLAG, path, f"`tokenizers` cannot load it ({error}); {_FIX}") from None
        _encode_whole_text(self._pipeline)
        vocab = self._pipeline.get_vocab(with_added_tokens=True)
        if not vocab:
            raise option_error(_FLAG, path, f"has an empty vocabulary; {_FIX}")
        self.vocab_size = max(vocab.values()) + 1
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if path.with_name(name).exists():
                files[name] = read_bytes(_FLAG, str(path.with_name(name)), _CONFIG_FIX)
        eod = _find_eod(vocab, path, files)
        self.eod = vocab[eod]
        special = {token["content"] for token in parts.get("added_tokens") or () if token["special"]}
        self._encoder = self._pipeline
        if (unspellable := _without_pieces(parts, {eod, *special})) is not None:
            self._encoder = Pipeline.from_str(json.dumps(unspellable))
            _encode_whole_text(self._encoder)
        decisive = {name: parts.get(name) for name in _PARTS_THAT_DECIDE_IDS}
        self.fingerprint = fingerprint_of(self.kind, [decisive, self.eod])

    @property
    def published_begin(self) -> tuple[int, ...]:
        made = self._pipeline.encode("a")
        added = takewhile(itemgetter(1), zip(made.ids, made.special_tokens_mask, strict=True))
        return tuple(index for index, _ in added)

    def to_tokenizers(self) -> str:
        parts = json.loads(self._pipeline.to_str())
        return json.dumps(parts | {"post_processor": None}, ensure_ascii=False)


def _encode_whole_text(pipeline: Any) -> None:
    """Switch off what a file may have been saved with, and special tokens that a text spells."""
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = True


def _check_unknown(parts: dict[str, Any], path: Location) -> None:
    """A piece for unknown text that is named is there: `tokenizers` finds out at the first such text."""
    model = parts.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        return
    unknown, of_bytes = model.get("unk_token"), "ByteLevel" in json.dumps(parts.get("pre_tokenizer"))
    if isinstance(unknown, str) and unknown not in model["vocab"] and not of_bytes:
        fix = "which its vocabulary lacks, so that unknown text has no id; add it there"
        raise option_error(_FLAG, path, f"names the unk_token {unknown!r}, {fix}")


def _without_pieces(parts: dict[str, Any], special: Collection[str]) -> dict[str, Any] | None:
    """The tokenizer.json for encoding where the model makes pieces of `special` of text; None if it does not.

    A model that looks up whole words would give a text that spells `</s>` the id of the token. There such
    pieces have names that no text can spell, and the same ids. That of unknown text keeps its name.
    """
    model = parts["model"]
    vocab, unknown = model["vocab"], model.get("unk_token")
    names: Iterable[str] = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    if pairs and not model.get("ignore_merges"):  # else whole words are looked up
        names = map("".join, pairs)
    found = set(special) & set(names) - {unknown}
    if not found:
        return None
    hidden = {name: f"{name} {secrets.token_hex(16)}" for name in found}
    if isinstance(vocab, dict):
        model = model | {"vocab": {hidden.get(name, name): id for name, id in vocab.items()}}
    else:
        model = model | {"vocab": [[hidden.get(name, name), score] for name, score in vocab]}
    if pairs:
        model["merges"] = [list(pair) for pair in pairs if not found & {*pair, "".join(pair)}]
    added = [
        token | {"content": hidden.get(token["content"], token["content"])}
        for token in parts.get("added_tokens") or ()
    ]
    return parts | {"model": model, "added_tokens": added, "post_processor": None}


def _find_eod(vocab: dict[str, int], path: Location, files: dict[str, bytes]) -> str:
    named: dict[str, Location] = {}  # the file that names each token, of those that transformers reads
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        if name not in files:
            continue
        config_path = path.with_name(name)
        eos = parse_json(files[name], _FLAG, str(config_path), _CONFIG_FIX).get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(eos, str | None):
            raise option_error(_FLAG, config_path, f"its eos_token {eos!r} is not text; {_CONFIG_FIX}")
        if eos is not None:
            if eos not in vocab:
                fix = "name one that it has there"
                raise option_error(_FLAG, path, f"lacks {eos!r}, the eos_token of {config_path}; {fix}")
            named.setdefault(eos, config_path)
    if len(named) > 1:
        both = " and ".join(f"{eos!r} in {place.name}" for eos, place in named.items())
        raise option_error(_FLAG, path, f"has two ends of document, {both}; name the same eos_token in both")
    eods = [*named] or [eos for eos in _USUAL_EODS if eos in vocab]
    if len(eods) != 1:
        what = "several possible ends of document" if eods else "no end of document"
        fix = f"name an eos_token in {path.with_name(TOKENIZER_CONFIG)}"
        raise option_error(_FLAG, path, f"has {what}: {fix}" + ("" if eods else f", or add {_USUAL_EODS[0]}"))
    return eods[0]
