"""Tokens on disk to micro-batches: indexed files, split, blend, sample order, loader; `open` is the start."""
