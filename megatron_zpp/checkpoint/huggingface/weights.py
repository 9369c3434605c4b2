"""Reads a model's weights from safetensors files, any range of any of our parameters, as fp32.

A directory holds model.safetensors, or model.safetensors.index.json, which says the file of each tensor.
"""

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.huggingface.architecture import read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import WEIGHTS_FILE, WEIGHTS_INDEX, NamedDirectory
from megatron_zpp.checkpoint.huggingface.names import (
    OUTPUT,
    THEIR_OUTPUT,
    TOKENS,
    TransformersTensor,
    names_of,
)
from megatron_zpp.checkpoint.imported import parameter_shapes
from megatron_zpp.checkpoint.slices import fill
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.values.json_file import read_json_object, shown_key
from megatron_zpp.placement import Layout, Placement, within
from megatron_zpp.storage.regular import UnfitFile, is_name, open_regular

_DTYPES = ("F32", "BF16", "F16")  # all of which fp32 holds exactly
_TABLES = (TOKENS, OUTPUT)


class HuggingFaceWeights(ExitStack):
    """The weights of `named` for a model of `config` and a tokenizer of `entries`. Use it in a `with` block.

    Raises ValueError, in one line, unless the files hold the tensors of that model and nothing else.
    Rows that only pad the vocabulary are zero.
    """

    def __init__(self, named: NamedDirectory, config: ModelConfig, entries: int) -> None:
        super().__init__()
        self._named, self._config, self._entries = named, config, entries
        self._names = names_of(config, read_architecture(named).model_type)
        try:
            self._slices = self._open()
            self.shapes = self._expected_shapes()
            self._check()
        except BaseException:
            self.close()
            raise

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to before `stop` of one of our parameters, flattened."""
        width = math.prod(self.shapes[name][1:])
        found = torch.zeros(stop - start)
        begin = 0  # the first element of their tensor in our parameter
        for theirs in self._tensors(name):
            end = begin + theirs.rows * width
            low, high = max(start, begin), min(stop, end)
            if low < high:
                first, last = (low - begin) // width, -(-(high - begin) // width)
                slices, rows = self._slices[theirs.name], slice(theirs.first + first, theirs.first + last)
                part = slices[:, rows].T if theirs.transposed else slices[rows]
                part = part.reshape(-1)[low - begin - first * width :][: high - low]
                found[low - start : high - start] = part
            begin = end
        return found

    def unit_elements(self, layout: Layout, elements: range, rank: int) -> Tensor:
        """Return elements of the flat buffer of a unit, as a rank of the job has it; its gaps are zero."""
        found = torch.zeros(len(elements))
        for piece in layout.pieces_in(elements):
            name = piece.placement.name

            def read_into(_: int, first: int, target: Tensor, name: str = name) -> None:
                target.copy_(self.elements(name, first, first + len(target)))

            whole = Placement(name=name, shape=self.shapes[name])
            fill(found[within(piece.at, elements)], piece, rank, whole, read_into)
        return found

    def parameter(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.elements(name, 0, math.prod(shape)).view(shape)

    def parameters(self) -> dict[str, Tensor]:
        return {name: self.parameter(name) for name in self.shapes}

    def _open(self) -> dict[str, Any]:
        """Return slices by the tensors' names, without the prefix."""
        slices = {}
        for file, names in self._files().items():
            handle = self._open_file(file)
            there = set(handle.keys())
            for name in there if names is None else names:
                if name not in there:
                    raise self._named.error(
                        f"{WEIGHTS_INDEX}: {file} has no tensor {shown_key(name)}; download the files again"
                    )
                slices[name] = handle.get_slice(name)
        found: dict[str, Any] = {}
        for name, bare in self._names.bare(slices).items():
            if bare in found:
                raise self._named.error(f"has {shown_key(bare)} twice, the second time as {shown_key(name)}")
            found[bare] = slices[name]
        return found

    def _files(self) -> Mapping[str, list[str] | None]:
        """Return the names of tensors by file; None stands for all tensors of the file."""
        path = self._named.path
        if (path / WEIGHTS_FILE).exists():
            return {WEIGHTS_FILE: None}
        if not (path / WEIGHTS_INDEX).exists():
            if any(path.glob("*.bin")):
                raise self._named.error(
                    "its weights are pickled (.bin), and a pickle can run code; save it as safetensors "
                    "(save_pretrained of a recent transformers)"
                )
            raise self._named.error(
                f"holds neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}; name a directory that does"
            )
        files: dict[str, list[str]] = {}
        weight_map = read_json_object(self._named.flag, str(path / WEIGHTS_INDEX)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._named.error(f"{WEIGHTS_INDEX}: has no weight_map; download it again")
        for name, file in weight_map.items():
            if not is_name(file):
                raise self._named.error(
                    f"{WEIGHTS_INDEX}: {shown_key(name)} is in no file beside it; download it again"
                )
            files.setdefault(file, []).append(name)
        return files

    def _open_file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._named.path / file
        try:
            os.close(open_regular(path))  # says why not; safetensors takes all for a file that is missing
            return self.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError:
            raise self._named.error(f"{file}: missing; download the files again") from None
        except UnfitFile as error:
            raise self._named.error(f"{file}: {error.strerror}; download the files again") from None
        except OSError as error:
            raise self._named.error(f"{file}: cannot be read ({error.strerror or error}); check it") from None
        except SafetensorError as error:
            raise self._named.error(
                f"{file}: not a whole safetensors file ({error}); download it again"
            ) from None

    def _tensors(self, ours: str) -> tuple[TransformersTensor, ...]:
        """Return the tensors that make up one of our parameters, without rows of padding."""
        shape = self.shapes[ours]
        if ours in _TABLES:
            shape = (self._config.vocabulary(self._entries), *shape[1:])
        return self._names.tensors(ours, shape, self._config)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        layers, width = self._config.num_layers, self._config.hidden_size
        name = f"layers.{layers - 1}.attention.output.weight"
        (last,) = self._names.tensors(name, (width, width), self._config)
        if last.name not in self._slices:  # before thousands of layers are built because a file asks for them
            raise self._named.error(f"has no tensor {last.name}; config.json asks for {layers} layers")
        return parameter_shapes(self._config, self._entries)

    def _check(self) -> None:
        expected = set()
        for ours in self.shapes:
            for theirs in self._tensors(ours):
                self._check_tensor(theirs, ours)
                expected.add(theirs.name)
        for name in sorted(self._slices.keys() - expected):
            if name == THEIR_OUTPUT:
                table = self._tensors(TOKENS)[0].name
                if not torch.equal(self._slices[THEIR_OUTPUT][:], self._slices[table][:]):
                    raise self._named.error(
                        f"lm_head.weight is not {table}, but tie_word_embeddings says so; set that to false"
                    )
            elif not self._names.buffers.fullmatch(name):
                raise self._named.error(
                    f"its tensor {shown_key(name)} is no part of the model that its config.json describes"
                )

    def _check_tensor(self, theirs: TransformersTensor, ours: str) -> None:
        if theirs.name not in self._slices:
            raise self._named.error(f"has no tensor {theirs.name}; config.json asks for one")
        tensor, shape = self._slices[theirs.name], (theirs.rows_in_all, *self.shapes[ours][1:])
        needed, found = tuple(reversed(shape)) if theirs.transposed else shape, tuple(tensor.get_shape())
        if found != needed:
            raise self._named.error(f"{theirs.name} has shape {found}; config.json asks for {needed}")
        if tensor.get_dtype() not in _DTYPES:
            raise self._named.error(
                f"{theirs.name} is {tensor.get_dtype()}; must be one of {', '.join(_DTYPES)}"
            )
