"""A data set written byte by byte from the description of the format, without the package's writer."""

import struct
from pathlib import Path

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}


def write_by_hand(prefix, sequences, kind="H", documents=None):
    """Write the files; `kind` is struct's letter of the token type. Default: a document per sequence."""
    tokens = [token for sequence in sequences for token in sequence]
    pointers, position = [], 0
    for sequence in sequences:
        pointers.append(position)
        position += len(sequence) * struct.calcsize(kind)
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[kind])
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(documents)}q", *documents)
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    Path(f"{prefix}.idx").write_bytes(index)
