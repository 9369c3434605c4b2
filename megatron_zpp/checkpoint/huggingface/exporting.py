"""Writes a directory for transformers from a checkpoint of any stage and number of ranks."""

import json
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.huggingface.compare import compare_logits
from megatron_zpp.checkpoint.huggingface.named_directory import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    NamedDirectory,
    check_empty,
)
from megatron_zpp.checkpoint.huggingface.names import OUTPUT, TOKENS, Names, names_of
from megatron_zpp.checkpoint.huggingface.tokenizer_files import check_auto_tokenizer, write_tokenizer
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.imported import parameter_shapes, whole_model
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.shapes.config_json import CONFIG
from megatron_zpp.config.shapes.huggingface_export import huggingface_values
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.files import commit_directory, fsync, write_durably
from megatron_zpp.storage.location import Location
from megatron_zpp.tokenizer.base import Tokenizer


def export_checkpoint(
    named: NamedDirectory, checkpoint: Location, target: Path, *, with_tokenizer: bool, file_bytes: int
) -> list[str]:
    """Write `target`, which gets its name when all of it is checked, and return lines that say so.

    A file holds `file_bytes` of weights, but at least one tensor; so much is held in memory, and all weights
    twice if transformers is installed to compare with.
    """
    with CheckpointReader(checkpoint) as reader:
        model = reader.config().model
        try:
            tokenizer, files = trained_tokenizer(reader)
            rows = model.vocabulary(tokenizer.vocab_size)
            described = huggingface_values(model, rows, tokenizer.eod)
        except DamagedFile:
            raise
        except ValueError as error:
            raise named.error(str(error)) from None
        weights = _Weights(reader, model, tokenizer.vocab_size)
        partial = _beside(target, "partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed export left
        partial.mkdir(parents=True)
        try:
            generation = {key: described[key] for key in ("bos_token_id", "eos_token_id")}
            for name, value in ((CONFIG, described), ("generation_config.json", generation)):
                write_durably(partial / name, (json.dumps(value, indent=2) + "\n").encode())
            lines = [f"{target}: {described['architectures'][0]} of {checkpoint}, vocab_size {rows}"]
            if with_tokenizer:
                longest = model.max_position_embeddings
                lines.append(write_tokenizer(named, tokenizer, files, partial, longest))
            _write_weights(partial, weights, names_of(model, described["model_type"]), file_bytes)
            reader.check_rest(0, 1)
            lines.append(_check(named, partial, weights, tokenizer))
            for path in partial.iterdir():
                fsync(path)
            if target.exists():
                target.rmdir()  # empty, or it was refused
            commit_directory(partial, target, _beside(target, "retired"))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return lines


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


class _Weights:
    """The weights of a checkpoint; `shapes` has all parameters by our names, without rows of padding.

    Raises DamagedFile unless they are those of the `model` that the checkpoint describes.
    """

    def __init__(self, reader: CheckpointReader, model: ModelConfig, entries: int) -> None:
        self.reader, self.model = reader, model
        self.shapes = parameter_shapes(model, entries)
        reader.check_model(self.shapes)
        for name in {TOKENS, OUTPUT} & self.shapes.keys():
            self.shapes[name] = (model.vocabulary(entries), *self.shapes[name][1:])

    def read(self, name: str) -> Tensor:
        return self.reader.parameter(name)[: self.shapes[name][0]]


def _write_weights(directory: Path, weights: _Weights, names: Names, file_bytes: int) -> None:
    from safetensors.torch import save_file

    files: list[list[str]] = [[]]
    lengths = {name: 4 * math.prod(shape) for name, shape in weights.shapes.items()}  # bytes in fp32
    size = 0
    for name, length in lengths.items():
        if size and size + length > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += length
    weight_map: dict[str, str] = {}
    for number, parameters in enumerate(files, start=1):
        file = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        parts: dict[str, dict[int, Tensor]] = {}  # rows of each tensor, by the first
        for name in parameters:
            of_it = names.tensors(name, weights.shapes[name], weights.model)
            whole = weights.read(name).split([theirs.rows for theirs in of_it])
            for theirs, weight in zip(of_it, whole, strict=True):
                rows = weight.T if theirs.transposed else weight
                parts.setdefault(names.with_prefix(theirs.name), {})[theirs.first] = rows
        tensors = {name: _joined(rows) for name, rows in parts.items()}
        # By name, as safetensors does it: the directory is new, so nobody has planted a link in it.
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod((directory / CONFIG).stat().st_mode)  # as the umask says; its own is 0600
        weight_map |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(lengths.values())}, "weight_map": weight_map}
        write_durably(directory / WEIGHTS_INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _joined(parts: dict[int, Tensor]) -> Tensor:
    """A tensor of its rows, by the first of each part; without a copy if there is only one."""
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat([rows for _, rows in sorted(parts.items())])


def _check(named: NamedDirectory, directory: Path, weights: _Weights, tokenizer: Tokenizer) -> str:
    """Read all of it back, by our reader and by transformers if installed; return a line on the result."""
    written = NamedDirectory(named.flag, named.shown, directory)
    with HuggingFaceWeights(written, weights.model, tokenizer.vocab_size) as found:
        for name in weights.shapes:
            wanted = weights.read(name).flatten().view(torch.int32)
            if not torch.equal(wanted, found.elements(name, 0, len(wanted)).view(torch.int32)):
                raise named.error(
                    f"{name} did not come back from {directory} as it was written; check the disk"
                )
    model, entries = weights.model, tokenizer.vocab_size
    line = compare_logits(named, directory, lambda: whole_model(model, entries, weights.reader.parameters()))
    check_auto_tokenizer(named, tokenizer, directory)
    return line
