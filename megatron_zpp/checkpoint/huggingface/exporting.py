"""Writes a directory for transformers from a checkpoint of any stage and number of ranks."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.huggingface.architecture import config_json
from megatron_zpp.checkpoint.huggingface.compare import LEFT_OUT, compare_logits, have_transformers
from megatron_zpp.checkpoint.huggingface.named_directory import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    NamedDirectory,
    check_empty,
)
from megatron_zpp.checkpoint.huggingface.names import OUTPUT, TOKENS, Names, names_of
from megatron_zpp.checkpoint.huggingface.tokenizer_files import (
    check_auto_tokenizer,
    is_written,
    write_tokenizer,
)
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.shapes.huggingface import CONFIG
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.files import commit_directory, fsync, write_durably
from megatron_zpp.storage.location import Location
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.zero.model_states import WEIGHTS


@dataclass(frozen=True)
class _Source:
    """A parameter of a checkpoint: its name there, and its shape without rows of padding."""

    name: str
    shape: tuple[int, ...]

    def read(self, reader: CheckpointReader) -> Tensor:
        return reader.elements(WEIGHTS, self.name, range(math.prod(self.shape))).view(self.shape)


def export_checkpoint(
    named: NamedDirectory, checkpoint: Location, target: Path, *, with_tokenizer: bool, file_bytes: int
) -> list[str]:
    """Write `target`, which gets its name when all of it is checked, and return lines that say so.

    A file holds `file_bytes` of weights, but at least one tensor; so much is held in memory, and all weights
    twice if transformers is installed to compare with.
    """
    with CheckpointReader(checkpoint) as reader:
        config = reader.config()
        try:
            tokenizer, files = trained_tokenizer(reader)
        except DamagedFile:
            raise
        except ValueError as error:
            raise named.error(str(error)) from None
        rows = config.model.vocabulary(tokenizer.vocab_size)
        described = config_json(named, config.model, rows, tokenizer.eod)
        partial = _beside(target, "partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed export left
        partial.mkdir(parents=True)
        try:
            for name, value in ((CONFIG, described), ("generation_config.json", _generation(described))):
                write_durably(partial / name, (json.dumps(value, indent=2) + "\n").encode())
            lines = []
            if with_tokenizer:
                longest = config.model.max_position_embeddings
                lines.append(write_tokenizer(named, tokenizer, files, partial, longest))
            sources = _sources(checkpoint, reader, config.model, tokenizer.vocab_size)
            names = names_of(config.model, described["model_type"])
            _write_weights(partial, reader, sources, config.model, names, file_bytes)
            reader.check_rest(0, 1)
            lines.append(_check(named, partial, reader, sources, config.model, tokenizer))
            for path in partial.iterdir():
                fsync(path)
            if target.exists():
                target.rmdir()  # empty, or it was refused
            commit_directory(partial, target, _beside(target, "retired"))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return [
        f"{target}: {described['architectures'][0]} of {checkpoint}, vocab_size {rows}",
        *lines,
    ]


def check_target(flag: str, target: Path) -> None:
    """Raise ValueError unless an export can get the name `target`: it is free, or an empty directory."""
    if target.name in ("", ".."):
        raise option_error(flag, target, "has no name that an export can get; name a new directory")
    if target.is_symlink():
        raise option_error(flag, target, "is a symbolic link; name a new directory")
    check_empty(flag, target)


def _beside(target: Path, what: str) -> Path:
    """A directory that only exports of this program make and remove."""
    return target.with_name(f".{target.name}.megatron_zpp-export.{what}")


def _generation(described: dict) -> dict:
    return {key: described[key] for key in ("bos_token_id", "eos_token_id")}


def _sources(
    checkpoint: Location, reader: CheckpointReader, model: ModelConfig, entries: int
) -> dict[str, _Source]:
    """All parameters by our names. Raises DamagedFile unless they are those of `model`."""
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in GPT(model, entries).named_parameters()}
    found = {}
    for unit in reader.units:
        for name, entry in unit["parameters"].items():
            found[name] = _Source(name, tuple(entry["shape"]))
    if {name: source.shape for name, source in found.items()} != expected:
        raise DamagedFile(f"{checkpoint / STATE}: its weights are not those of the model that it describes")
    for name in (TOKENS, OUTPUT):
        if name in found:
            found[name] = _Source(name, (model.vocabulary(entries), found[name].shape[1]))
    return found


def _write_weights(
    directory: Path,
    reader: CheckpointReader,
    sources: dict[str, _Source],
    model: ModelConfig,
    names: Names,
    file_bytes: int,
) -> None:
    from safetensors.torch import save_file

    files: list[dict[str, _Source]] = [{}]
    size = 0
    for name, source in sources.items():
        length = 4 * math.prod(source.shape)
        if size and size + length > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = source
        size += length
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        file = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        parts: dict[str, dict[int, Tensor]] = {}  # rows of each tensor, by the first
        for name, source in part.items():
            tensors_of_it = names.tensors(name, source.shape, model)
            weights = source.read(reader).split([theirs.rows for theirs in tensors_of_it])
            for theirs, weight in zip(tensors_of_it, weights, strict=True):
                rows = weight.T if theirs.transposed else weight
                parts.setdefault(names.with_prefix(theirs.name), {})[theirs.first] = rows
        tensors = {name: _joined(rows) for name, rows in parts.items()}
        # By name, as safetensors does it: the directory is new, so nobody has planted a link in it.
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod((directory / CONFIG).stat().st_mode)  # as the umask says; its own is 0600
        weight_map |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        total = sum(4 * math.prod(source.shape) for source in sources.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(directory / WEIGHTS_INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _joined(parts: dict[int, Tensor]) -> Tensor:
    """A tensor of its rows, by the first of each part; without a copy if there is only one."""
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat([rows for _, rows in sorted(parts.items())])


def _check(
    named: NamedDirectory,
    directory: Path,
    reader: CheckpointReader,
    sources: dict[str, _Source],
    model: ModelConfig,
    tokenizer: Tokenizer,
) -> str:
    """Read all of it back, by our reader and by transformers if installed; return a line on the result."""
    written = NamedDirectory(named.flag, named.shown, directory)
    with HuggingFaceWeights(written, model, tokenizer.vocab_size) as weights:
        for name, source in sources.items():
            wanted = source.read(reader).flatten().view(torch.int32)
            if not torch.equal(wanted, weights.elements(name, 0, len(wanted)).view(torch.int32)):
                raise named.error(
                    f"{name} did not come back from {directory} as it was written; check the disk"
                )
    if not have_transformers():
        return LEFT_OUT
    with torch.device("meta"):
        loaded = GPT(model, tokenizer.vocab_size)
    loaded.load_state_dict(reader.parameters(), assign=True)
    line = compare_logits(named, directory, loaded)
    if is_written(directory):
        check_auto_tokenizer(named, tokenizer, directory)
    return line
