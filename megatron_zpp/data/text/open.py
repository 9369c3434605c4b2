"""Opens text for a run, with a cache of its tokens that later runs can use."""

import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.text import HUB, SUFFIXES, fixed_directory, is_hub, is_sharded
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.corpus.inputs import find_files, read_blocks
from megatron_zpp.data.indexed import token_dtype
from megatron_zpp.data.order_cache import contents_of
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.sources import JsonLinesText, TextSource
from megatron_zpp.storage.files import fsync, keep_first, locked, open_new, write_durably

_VERSION = 1  # of the cache's format
_BLOCK_BYTES = 1 << 20


def open_text(
    flag: str,
    path: str,
    *,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    description: Mapping[str, Any],
    say: Callable[[str], None],
) -> TokenCache:
    """The tokens of the text `path` of `flag`, none of which are made yet.

    `description` describes the `tokenizer`; `say` gets a line about anything that takes long.

    Raises ValueError, one line, if the text or the cache cannot be used.
    """
    shown = data.data_cache_path or _default_directory(path)
    cache_flag = "--data-cache-path" if data.data_cache_path else "--data-cache-path (not given)"
    directory = Path(shown)
    source: TextSource
    try:
        if is_hub(path):
            from megatron_zpp.data.text.shards.hub import open_hub

            source = open_hub(flag, path, data.json_key, directory)
        elif is_sharded(path):
            from megatron_zpp.data.text.shards.text import open_shards

            source = open_shards(flag, path, find_files(flag, [path]), data.json_key, directory)
        elif path.endswith(SUFFIXES):
            source = JsonLinesText(flag, path, _unpacked(flag, path, directory, say))
        else:
            source = JsonLinesText(flag, path, path)
        made_of = {
            "version": _VERSION,
            "text": dict(source.made_of),
            "blocks": source.blocks,
            "tokenizer": dict(description),
            "json_key": data.json_key,
            "append_eod": data.append_eod,
        }
        entry = _entry(directory, made_of)
        return TokenCache(
            entry,
            source,
            partial(Encoder, tokenizer, (data.json_key,), data.append_eod),
            token_dtype(description["vocab_size"]),
            skip=data.skip_bad_lines,
            workers=data.num_workers,
        )
    except OSError as error:
        fix = f"{error.strerror}; name a writable directory with free space"
        raise option_error(cache_flag, shown, fix) from None


def _default_directory(path: str) -> str:
    """Return the directory of the tokens of a text: beside it, or in the working directory for the hub."""
    if is_hub(path):
        return f"{path.removeprefix(HUB)}.tokens"
    if is_sharded(path):
        path = fixed_directory(path) or "shards"
    return f"{path}.tokens"


def _entry(directory: Path, made_of: Mapping[str, Any]) -> Path:
    """Create and return the cache directory for `made_of`, which is kept there for people to read."""
    text = json.dumps(made_of, sort_keys=True, indent=1)
    entry = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
    entry.mkdir(parents=True, exist_ok=True)
    kept = entry / "made_of.json"
    if kept.is_symlink() or not kept.exists():  # processes that come at once each write their own
        own = entry / f"{kept.name}.{secrets.token_hex(8)}.partial"
        write_durably(own, (text + "\n").encode())
        os.replace(own, kept)
    return entry


def _unpacked(flag: str, path: str, directory: Path, say: Callable[[str], None]) -> str:
    """Return an uncompressed copy, in which any block is read as fast as the first; one process makes it."""
    try:
        contents = contents_of(path)
    except OSError as error:
        raise option_error(flag, path, f"{error.strerror}; name a file that can be read") from None
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]
    plain = directory / f"{digest}.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / "lock") as held:
        if not plain.exists():
            say(f"unpacking {path}, once; {plain}")
            # A lock may hold on this host alone. What a killed process leaves has a name that is used again.
            own = platform.node() if held else secrets.token_hex(8)
            partial_copy = plain.with_name(f"{plain.name}.{own}.partial")
            with os.fdopen(open_new(partial_copy), "wb") as output:
                for block in read_blocks(path, _BLOCK_BYTES):
                    output.write(block.content)
            fsync(partial_copy)  # from here on the copy counts as complete
            keep_first(partial_copy, plain)
    return str(plain)
