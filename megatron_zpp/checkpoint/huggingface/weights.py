"""Reads a GPT-2's weights from safetensors files, any range of any of our parameters, as fp32.

A directory holds model.safetensors, or model.safetensors.index.json, which says the file of each tensor.
"""

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.huggingface.named_directory import WEIGHTS_FILE, WEIGHTS_INDEX, NamedDirectory
from megatron_zpp.checkpoint.huggingface.names import (
    OUTPUT,
    PREFIX,
    THEIR_OUTPUT,
    THEIR_TOKENS,
    TOKENS,
    Theirs,
    is_mask,
    their_name,
)
from megatron_zpp.config.json_file import read_json_object, shown_key
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.regular import UnfitFile, open_regular
from megatron_zpp.zero.flat_layout import FlatLayout

_DTYPES = ("F32", "BF16", "F16")  # all of which fp32 holds exactly
_TABLES = (TOKENS, OUTPUT)


class HuggingFaceWeights:
    """The weights of `named` for a model of `config`. Use it in a `with` block.

    Raises ValueError, in one line, unless the files hold the tensors of that GPT-2 and nothing else.
    Rows that only pad the vocabulary are zero.
    """

    def __init__(self, named: NamedDirectory, config: ModelConfig, vocab_size: int) -> None:
        self._named, self._vocab_size = named, vocab_size
        self._open_files = ExitStack()
        try:
            self._slices = self._open()
            self.shapes = self._expected_shapes(config)
            self._check()
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> "HuggingFaceWeights":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the files."""
        self._slices = {}
        self._open_files.close()

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from `start` to before `stop` of one of our parameters, flattened."""
        width = math.prod(self.shapes[name][1:])
        rows = self._vocab_size if name in _TABLES else self.shapes[name][0]
        first, last = min(start // width, rows), min(-(-stop // width), rows)
        found = torch.zeros(stop - start)
        if first < last:
            theirs = their_name(name)
            slices = self._slices[theirs.name]
            part = slices[:, first:last].T if theirs.transposed else slices[first:last]
            part = part.reshape(-1)[start - first * width :][: stop - start]
            found[: len(part)] = part
        return found

    def unit_elements(self, names: tuple[str, ...], layout: FlatLayout, elements: range) -> Tensor:
        """Some elements of the flat buffer of a unit with these parameters; its gaps are zero."""
        found = torch.zeros(len(elements))
        for piece in layout.pieces(elements):
            part = self.elements(names[piece.parameter], piece.start, piece.start + piece.length)
            found[piece.destination : piece.destination + piece.length] = part
        return found

    def parameters(self) -> dict[str, Tensor]:
        """All of them by our names, whole."""
        return {
            name: self.elements(name, 0, math.prod(shape)).view(shape) for name, shape in self.shapes.items()
        }

    def _open(self) -> dict[str, Any]:
        """Slices by the tensors' names, without PREFIX."""
        slices = {}
        for file, names in self._files().items():
            handle = self._open_file(file)
            there = set(handle.keys())
            for name in there if names is None else names:
                if name not in there:
                    raise self._named.error(
                        f"{WEIGHTS_INDEX}: {file} has no tensor {shown_key(name)}; fetch the files anew"
                    )
                slices[name.removeprefix(PREFIX)] = handle.get_slice(name)
        return slices

    def _files(self) -> Mapping[str, list[str] | None]:
        """The names of tensors by file; None stands for all that it has."""
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
            raise self._named.error(f"{WEIGHTS_INDEX}: has no weight_map; fetch it anew")
        for name, file in weight_map.items():
            if not _is_file_name(file):
                raise self._named.error(
                    f"{WEIGHTS_INDEX}: {shown_key(name)} is in no file beside it; fetch it anew"
                )
            files.setdefault(file, []).append(name)
        return files

    def _open_file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._named.path / file
        try:
            os.close(open_regular(path))  # says why not; safetensors takes all for a file that is missing
            return self._open_files.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError:
            raise self._named.error(f"{file}: missing; fetch the files anew") from None
        except UnfitFile as error:
            raise self._named.error(f"{file}: {error.strerror}; fetch the files anew") from None
        except OSError as error:
            raise self._named.error(f"{file}: cannot be read ({error.strerror or error}); check it") from None
        except SafetensorError as error:
            raise self._named.error(
                f"{file}: not a whole safetensors file ({error}); fetch it anew"
            ) from None

    def _expected_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        last = their_name(f"layers.{config.num_layers - 1}.attention_norm.weight").name
        if last not in self._slices:  # before thousands of layers are made because a file asks for them
            raise self._named.error(f"has no tensor {last}; config.json asks for {config.num_layers} layers")
        with torch.device("meta"):
            parameters = GPT(config, self._vocab_size).named_parameters()
        return {name: tuple(parameter.shape) for name, parameter in parameters}

    def _check(self) -> None:
        expected = {their_name(name).name: name for name in self.shapes}
        for theirs, ours in expected.items():
            self._check_tensor(Theirs(theirs, their_name(ours).transposed), ours)
        for theirs in sorted(self._slices.keys() - expected.keys()):
            if theirs == THEIR_OUTPUT:
                if not torch.equal(self._slices[THEIR_OUTPUT][:], self._slices[THEIR_TOKENS][:]):
                    raise self._named.error(
                        "lm_head.weight is not wte.weight, but tie_word_embeddings says so; set that to false"
                    )
            elif not is_mask(theirs):
                raise self._named.error(
                    f"its tensor {shown_key(theirs)} is no part of a GPT-2 language model of its config.json"
                )

    def _check_tensor(self, theirs: Theirs, ours: str) -> None:
        if theirs.name not in self._slices:
            raise self._named.error(f"has no tensor {theirs.name}; config.json asks for one")
        tensor, shape = self._slices[theirs.name], self.shapes[ours]
        if ours in _TABLES:
            shape = (self._vocab_size, *shape[1:])
        needed, found = tuple(reversed(shape)) if theirs.transposed else shape, tuple(tensor.get_shape())
        if found != needed:
            raise self._named.error(f"{theirs.name} has shape {found}; config.json asks for {needed}")
        if tensor.get_dtype() not in _DTYPES:
            raise self._named.error(
                f"{theirs.name} is {tensor.get_dtype()}; must be one of {', '.join(_DTYPES)}"
            )


def _is_file_name(value: Any) -> bool:
    """Whether it can only be the name of a file beside the index."""
    return (
        type(value) is str and value.isprintable() and value not in ("", "..") and Path(value).name == value
    )
