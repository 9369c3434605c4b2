"""The tokenizer of a checkpoint, from the files in it; in older checkpoints from where the run read them."""

from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer.base import Tokenizer, describe, in_words
from megatron_zpp.tokenizer.build import build_tokenizer, saved_config, saved_names
from megatron_zpp.tokenizer.files import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG


def trained_tokenizer(reader: CheckpointReader) -> tuple[Tokenizer, TokenizerConfig]:
    """The tokenizer that a checkpoint was trained with, and settings that name its files.

    Raises DamagedFile for files in the checkpoint that changed; ValueError for an older checkpoint, which
    has no such files, if those outside of it are gone or changed.
    """
    config, path = reader.config().tokenizer, reader.path
    names = saved_names(config)
    inside = all(map(reader.has_file, names))
    if inside:
        beside = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP] if names else []
        for name in (*names, *filter(reader.has_file, beside)):
            reader.check_file(name)
        config = saved_config(config, path)
    try:
        tokenizer = build_tokenizer(config)
    except ValueError as error:
        if inside:
            raise DamagedFile(f"{path}: {error}") from None
        raise ValueError(f"{path}: has no tokenizer files of its own, as it is older: {error}") from None
    saved, present = reader.state["tokenizer"], describe(tokenizer)
    if saved == present:
        return tokenizer, config
    differ = f"{path}: was trained with {in_words(saved)}, and"
    if inside:
        raise DamagedFile(f"{differ} its files give {in_words(present)}")
    raise ValueError(
        f"{differ} the files of its tokenizer now give {in_words(present)}; put back the files of that run"
    )
