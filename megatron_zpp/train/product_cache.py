"""The cache of measured algorithms: a file for each kind of GPU and version, private to the user."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from megatron_zpp.model.product_algorithms import ProductAlgorithms
from megatron_zpp.native.cache import building_directory, cache_directory, locked
from megatron_zpp.native.library_file import install, problem_of
from megatron_zpp.storage.regular import read_limited

_LIMIT = 16 * 2**20  # bytes of a file
_WAIT_SECONDS = 60.0  # for another run, which holds the lock for milliseconds


class ProductCache:
    """Algorithms of earlier starts in the directory MEGATRON_ZPP_CACHE. Raises BuildError, as it does."""

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        """`say` gets a line for a file that is damaged, and for a lock that is held for long."""
        self._directory, self._say = cache_directory(environ), say

    def read(self, own: ProductAlgorithms) -> dict[str, str]:
        """The chosen algorithms for the device and versions of `own`; none if the file is not whole."""
        path = self._path(own)
        problem = problem_of(path)
        if problem is None:
            try:
                found = ProductAlgorithms.from_json(json.loads(read_limited(path, _LIMIT)))
            except (ValueError, KeyError, TypeError) as error:
                problem = f"it is not a record of algorithms ({error})"
            else:
                if found.fits(own):
                    return dict(found.chosen)
                problem = f"it is of {found}"
        if path.exists():
            self._say(f"warning: algorithms of products are measured again: {path}: {problem}")
        return {}

    def add(self, own: ProductAlgorithms, chosen: Mapping[str, str]) -> None:
        """Keep `chosen` beside the algorithms that the file has, which win where it has the same products."""
        path = self._path(own)
        with locked(path.with_suffix(".lock"), self._say, _WAIT_SECONDS):
            merged = own.with_chosen({**chosen, **(self.read(own) if problem_of(path) is None else {})})
            with building_directory(self._directory, path.stem) as directory:
                built = directory / path.name
                built.write_text(json.dumps(asdict(merged), indent=1) + "\n")
                install(built, path)

    def _path(self, own: ProductAlgorithms) -> Path:
        key = hashlib.sha256(str(own).encode()).hexdigest()[:20]
        return self._directory / f"products-{key}.json"
