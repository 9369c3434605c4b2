"""GPT-2's byte-level BPE."""

from megatron_zpp.config.options import option_error
from megatron_zpp.tokenizer.base import PipelineTokenizer, fingerprint_of
from megatron_zpp.tokenizer.files import MERGES, VOCAB, parse_json, read_bytes

_EOD = "<|endoftext|>"
_VOCAB_FIX = "give GPT-2's vocab.json"
_MERGES_FIX = "give GPT-2's merges.txt"


class GPT2BPETokenizer(PipelineTokenizer):
    """Byte-level BPE from vocab.json and merges.txt, as GPT-2 published them; `<|endoftext|>` is the eod."""

    kind = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        """Raise ValueError when a file is missing or invalid, or when the two do not belong together."""
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import decoders, models, pre_tokenizers

        self.files = {
            VOCAB: read_bytes("--vocab-file", vocab_file, _VOCAB_FIX),
            MERGES: read_bytes("--merge-file", merge_file, _MERGES_FIX),
        }
        vocab = _parse_vocab(self.files[VOCAB], vocab_file)
        merges = _parse_merges(self.files[MERGES], merge_file)
        for first, second in merges:
            for piece in (first, second, first + second):
                if piece not in vocab:
                    raise option_error(
                        "--merge-file", merge_file, f"merges {piece!r}, which --vocab-file {vocab_file} lacks"
                    )
        # no added token: with one, a document that spells <|endoftext|> would end there
        self._encoder = self._pipeline = Pipeline(models.BPE(vocab, merges))
        self._pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._pipeline.decoder = decoders.ByteLevel()
        missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocab]
        if missing:
            raise option_error(
                "--vocab-file", vocab_file, f"lacks {len(missing)} of the 256 bytes; {_VOCAB_FIX}"
            )
        self.vocab_size = max(vocab.values()) + 1
        self.eod = vocab[_EOD]
        self.fingerprint = fingerprint_of(self.kind, [vocab, merges])

    def to_tokenizers(self) -> str:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Pipeline

        pipeline = Pipeline.from_str(self._pipeline.to_str())
        pipeline.add_special_tokens([AddedToken(_EOD, special=True, normalized=False)])
        return pipeline.to_str()


def _parse_vocab(text: bytes, path: str) -> dict[str, int]:
    vocab = parse_json(text, "--vocab-file", path, _VOCAB_FIX)
    for piece, index in vocab.items():
        if type(index) is not int or not 0 <= index < 2**31:
            raise option_error("--vocab-file", path, f"gives {piece!r} the id {index!r}; {_VOCAB_FIX}")
    if _EOD not in vocab:
        raise option_error("--vocab-file", path, f"has no {_EOD} to end a document with; {_VOCAB_FIX}")
    return vocab


def _parse_merges(text: bytes, path: str) -> list[tuple[str, str]]:
    try:
        lines = text.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError:
        raise option_error("--merge-file", path, f"is not UTF-8 text; {_MERGES_FIX}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#version") or not line.strip():
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise option_error("--merge-file", path, f"line {number} is not two pieces; {_MERGES_FIX}")
        merges.append((pieces[0], pieces[1]))
    return merges
