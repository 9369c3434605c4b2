"""A tokenizer.json of Hugging Face's `tokenizers`."""

import json
from collections.abc import Sequence
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.object_path import Location, location
from megatron_zpp.tokenizer.base import Tokenizer, check_unicode, fingerprint_of
from megatron_zpp.tokenizer.files import TOKENIZER, TOKENIZER_CONFIG, parse_json, read_bytes

_FLAG = "--tokenizer-model"
_FIX = "give a tokenizer.json, or the directory that holds one"
_CONFIG_FIX = "correct or remove it"
_USUAL_EODS = ("<|endoftext|>", "</s>")
_PARTS_THAT_DECIDE_IDS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class HuggingFaceTokenizer(Tokenizer):
    """Any `tokenizers` pipeline.

    Its end of document is the `eos_token` of the tokenizer_config.json beside it, else `<|endoftext|>`,
    else `</s>`. A post-processor, which adds special tokens around a text, is omitted, and so are the
    truncation and padding that a file may have been saved with.
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
        self._files = {TOKENIZER: content}
        parts = parse_json(content, _FLAG, str(path), _FIX)
        _check_merges(parts, path)
        try:
            self._pipeline = Pipeline.from_str(content.decode())
        except BaseException as error:  # `tokenizers` raises nothing more specific, and panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise option_error(_FLAG, path, f"`tokenizers` cannot load it ({error}); {_FIX}") from None
        self._pipeline.no_truncation()
        self._pipeline.no_padding()
        self._pipeline.encode_special_tokens = True
        vocab = self._pipeline.get_vocab(with_added_tokens=True)
        if not vocab:
            raise option_error(_FLAG, path, f"has an empty vocabulary; {_FIX}")
        self.vocab_size = max(vocab.values()) + 1
        config_path = path.with_name(TOKENIZER_CONFIG)
        if config_path.exists():
            self._files[TOKENIZER_CONFIG] = read_bytes(_FLAG, str(config_path), _CONFIG_FIX)
        self.eod = _find_eod(vocab, path, self._files.get(TOKENIZER_CONFIG))
        decisive = {name: parts.get(name) for name in _PARTS_THAT_DECIDE_IDS}
        self._digest = fingerprint_of(self.kind, [decisive, self.eod])

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._pipeline.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # what `tokenizers` says of half a surrogate pair
            check_unicode(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._pipeline.decode(list(ids), skip_special_tokens=False)

    def fingerprint(self) -> str:
        return self._digest

    def files(self) -> dict[str, bytes]:
        return dict(self._files)

    def to_tokenizers(self) -> str:
        parts = json.loads(self._pipeline.to_str())
        return json.dumps(parts | {"post_processor": None}, ensure_ascii=False)


def _check_merges(parts: dict[str, Any], path: Location) -> None:
    """Each merge of a BPE makes a piece that the vocabulary has: `tokenizers` panics over some that do not.

    The library itself reports values of a wrong type.
    """
    model = parts.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return
    vocab, merges = model.get("vocab"), model.get("merges")
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not isinstance(prefix, str):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        match pair:
            case [str(first), str(second)] if not first.startswith("#version"):
                if not second.startswith(prefix):
                    fix = f"which does not begin with its continuing_subword_prefix {prefix!r}; {_FIX}"
                    raise option_error(_FLAG, path, f"merges {second!r}, {fix}")
                for piece in (first, second, first + second.removeprefix(prefix)):
                    if piece not in vocab:
                        raise option_error(
                            _FLAG, path, f"merges {piece!r}, which its vocabulary lacks; {_FIX}"
                        )


def _find_eod(vocab: dict[str, int], path: Location, config: bytes | None) -> int:
    config_path = path.with_name(TOKENIZER_CONFIG)
    if config is not None:
        eos = _token_text(parse_json(config, _FLAG, str(config_path), _CONFIG_FIX).get("eos_token"))
        if not isinstance(eos, str | None):
            raise option_error(_FLAG, config_path, f"its eos_token {eos!r} is not text; {_CONFIG_FIX}")
        if eos is not None:
            if eos not in vocab:
                fix = "name one that it has there"
                raise option_error(_FLAG, path, f"lacks {eos!r}, the eos_token of {config_path}; {fix}")
            return vocab[eos]
    for eos in _USUAL_EODS:
        if eos in vocab:
            return vocab[eos]
    raise option_error(
        _FLAG,
        path,
        f"has no end of document: name an eos_token in {config_path}, or add {_USUAL_EODS[0]}",
    )


def _token_text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token
