"""Writes a SentencePiece model as a pipeline of Hugging Face's `tokenizers`.

Both formats have BPE and unigram models with byte fallback; what differs is around them. Whether a text gets
the same ids is for the caller to try: a few rules (ties between merges, spaces beside a piece of the user's)
cannot be expressed there.
"""

from typing import Any

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _OF_USER, _UNUSED = 1, 2, 3, 4, 5  # SentencePiece.Type


def to_pipeline(content: bytes) -> str:
    """The tokenizer.json for a .model file's bytes. Raises ValueError for one that cannot be written so."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf
    from tokenizers import AddedToken, Tokenizer, decoders

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made by protobuf
    model.ParseFromString(content)
    pieces = model.pieces
    if model.trainer_spec.treat_whitespace_as_suffix or any(piece.type == _UNUSED for piece in pieces):
        raise ValueError("spaces as suffixes and unused pieces cannot be written as a tokenizer.json")
    pipeline = Tokenizer(_model(model))
    if normalizer := _normalizer(model.normalizer_spec):
        pipeline.normalizer = normalizer
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    pipeline.decoder = decoders.Sequence(parts)
    special = (piece.piece for piece in pieces if piece.type in (_UNKNOWN, _CONTROL))
    pipeline.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    if model.trainer_spec.model_type == _BPE:  # a unigram model has them among its pieces
        of_user = (piece.piece for piece in pieces if piece.type == _OF_USER)
        pipeline.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in of_user])
    return pipeline.to_str()


def _model(model: Any) -> Any:
    from tokenizers import models

    pieces, spec = model.pieces, model.trainer_spec
    unknown = next(index for index, piece in enumerate(pieces) if piece.type == _UNKNOWN)
    if spec.model_type == _BPE:
        return models.BPE(
            {piece.piece: index for index, piece in enumerate(pieces)},
            _merges(pieces),
            unk_token=pieces[unknown].piece,
            fuse_unk=True,
            byte_fallback=spec.byte_fallback,
        )
    if spec.model_type != _UNIGRAM:
        raise ValueError("only bpe and unigram models can be written as a tokenizer.json")
    normal = [piece.score for piece in pieces if piece.type == _NORMAL]
    below = min(normal, default=0.0) - 1000.0  # a text that spells a byte or a special piece does not get it
    highest = max(normal, default=0.0)

    def score(piece: Any) -> float:
        if piece.type == _OF_USER:  # SentencePiece's own, by which these are always taken
            return len(piece.piece.encode()) * highest - 0.1
        return piece.score if piece.type == _NORMAL else below

    return models.Unigram([(piece.piece, score(piece)) for piece in pieces], unknown, spec.byte_fallback)


def _merges(pieces: Any) -> list[tuple[str, str]]:
    """All ways to put a piece together from two others, the piece of the best score first, as it is found."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type in (_NORMAL, _OF_USER)}
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                merges.append((-score, piece, cut))
    return [(piece[:cut], piece[cut:]) for _, piece, cut in sorted(merges)]


def _normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps) if steps else None
