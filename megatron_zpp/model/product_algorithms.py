"""The algorithms of a run's products, as checkpoints and the cache keep them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_MOST_PRODUCTS, _LONGEST = 10_000, 200  # of a state, and of a name in it


@dataclass(frozen=True)
class ProductAlgorithms:
    """Chosen algorithms by the names of products' shapes; an empty one is torch's own product.

    They compute the same bits on GPUs that are called `device` by the version `cublaslt` of cuBLASLt, and by
    torch `torch` where they are torch's own.
    """

    device: str
    cublaslt: int
    torch: str
    chosen: Mapping[str, str]

    def fits(self, other: "ProductAlgorithms") -> bool:
        """Whether both are of the same device and versions."""
        return (self.device, self.cublaslt, self.torch) == (other.device, other.cublaslt, other.torch)

    def with_chosen(self, chosen: Mapping[str, str]) -> "ProductAlgorithms":
        """The same device and versions, with these algorithms."""
        return replace(self, chosen=dict(sorted(chosen.items())))

    def __str__(self) -> str:
        return f"{self.device}, cuBLASLt {self.cublaslt}, torch {self.torch}"

    @classmethod
    def from_json(cls, value: Any) -> "ProductAlgorithms":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for other values."""
        device, cublaslt, version, chosen = (value[key] for key in ("device", "cublaslt", "torch", "chosen"))
        if type(device) is not str or type(cublaslt) is not int or type(version) is not str:
            raise ValueError(f"product algorithms are of device {device!r:.100}, cuBLASLt {cublaslt!r:.100}")
        if type(chosen) is not dict or len(chosen) > _MOST_PRODUCTS:
            raise ValueError("product algorithms are not by the names of products")
        for name, algorithm in chosen.items():
            if type(algorithm) is not str or len(name) > _LONGEST or len(algorithm) > _LONGEST:
                raise ValueError(f"the algorithm of product {name!r:.100} is {algorithm!r:.100}")
        return cls(device, cublaslt, version, chosen)
