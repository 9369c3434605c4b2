"""What a layer takes with 16-bit and with 8-bit products, and the cache of what earlier starts measured."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.config.root import Config
from megatron_zpp.native.cache import building_directory, cache_directory
from megatron_zpp.native.library_file import install, problem_of
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.train.device import Device
from megatron_zpp.version import __version__

_MARGIN = 0.02  # by which 8-bit products have to be faster: more than medians differ between starts
_LIMIT = 2**16  # bytes of a file
_OF_OTHER_PARTS = (  # of a model: a layer does not depend on these
    *("model_preset", "num_layers", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("padded_vocab_size", "untie_embeddings_and_output_weights", "init_method_std"),
)


@dataclass(frozen=True)
class LayerTimes:
    """Median seconds of forward and backward of a layer, with 16-bit and with 8-bit products."""

    bits16: float
    bits8: float

    @property
    def fp8_pays(self) -> bool:
        """Whether 8-bit products are faster by a clear margin."""
        return self.bits8 <= (1 - _MARGIN) * self.bits16

    @classmethod
    def from_json(cls, value: Any) -> "LayerTimes":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for other values."""
        times = cls(value["bits16"], value["bits8"])
        if not all(type(each) is float and isfinite(each) and each > 0 for each in asdict(times).values()):
            raise ValueError(f"times of a layer are {times}")
        return times


def measured_layer(config: Config, device: Device) -> dict[str, Any]:
    """What the times of a layer depend on, as JSON: the GPU, versions, shape, recipe and kernels."""
    model = {name: value for name, value in asdict(config.model).items() if name not in _OF_OTHER_PARTS}
    described = {
        "device": torch.cuda.get_device_name(device.device) if device.device.type == "cuda" else "CPU",
        "versions": [__version__, torch.__version__],
        "model": model,
        "micro_batch_size": config.training.micro_batch_size,
        "precision": {
            name: value for name, value in asdict(config.precision).items() if name.startswith("fp8")
        },
        "masked": config.data.reset_attention_mask,
        "cut": config.zero.cuts_layers,
        "recomputes_scores": config.recompute.recompute_granularity == "selective",
        **device.settings(),
    }
    return json.loads(json.dumps(described, sort_keys=True))


class LayerTimesCache:
    """Times of earlier starts, a file for each layer, in the directory MEGATRON_ZPP_CACHE.

    Raises BuildError, as `cache_directory` does.
    """

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        """`say` gets a line for a file that is damaged."""
        self._directory, self._say = cache_directory(environ), say

    def read(self, layer: Mapping[str, Any]) -> LayerTimes | None:
        """The times of a `measured_layer`; None if there is no file, or none that is whole."""
        path = self._path(layer)
        if not path.exists():
            return None
        problem = problem_of(path)
        if problem is None:
            try:
                found = json.loads(read_limited(path, _LIMIT))
                if found["layer"] == layer:
                    return LayerTimes.from_json(found["seconds"])
                problem = "it is of another layer"
            except (ValueError, KeyError, TypeError) as error:
                problem = f"it is not a record of times ({error})"
        self._say(f"warning: the times of a layer are measured again: {path}: {problem}")
        return None

    def add(self, layer: Mapping[str, Any], times: LayerTimes) -> None:
        """Keep the times of a `measured_layer`. Raises OSError."""
        path = self._path(layer)
        with building_directory(self._directory, path.stem) as directory:
            built = directory / path.name
            built.write_text(json.dumps({"layer": layer, "seconds": asdict(times)}, indent=1) + "\n")
            install(built, path)

    def _path(self, layer: Mapping[str, Any]) -> Path:
        key = hashlib.sha256(json.dumps(layer, sort_keys=True).encode()).hexdigest()[:20]
        return self._directory / f"layer-{key}.json"
