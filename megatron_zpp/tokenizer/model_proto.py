"""Edits a SentencePiece model's protocol buffer without the protobuf package.

The format is ModelProto of sentencepiece_model.proto: fields follow one another, each a tag (number * 8 +
wire type) and a value of that type.
"""

from collections.abc import Iterator

_NORMALIZER_SPECS = (3, 5)  # of ModelProto: normalizer_spec, denormalizer_spec
_RULE_FILE = 6  # of NormalizerSpec: normalization_rule_tsv; its contents are compiled into another field

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def without_rule_files(model: bytes) -> bytes:
    """The same model without the names of the temporary files its rules came from.

    They would make the bytes of two models that are the same differ.
    """
    parts = []
    for number, field, content in _fields(model):
        if number in _NORMALIZER_SPECS:
            kept = b"".join(inner for index, inner, _ in _fields(content) if index != _RULE_FILE)
            field = _varint(number << 3 | _BYTES) + _varint(len(kept)) + kept
        parts.append(field)
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, whole field and, of the wire type that has one, content of every field."""
    position = 0
    while position < len(message):
        start = position
        tag, position = _read_varint(message, position)
        content = b""
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _read_varint(message, position)
        elif wire_type == _BYTES:
            size, position = _read_varint(message, position)
            content = message[position : position + size]
            position += size
        else:
            position += {_FIXED64: 8, _FIXED32: 4}[wire_type]
        yield tag >> 3, message[start:position], content


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, seven bits a byte with the lowest first, and where it ends."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return number, position


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
