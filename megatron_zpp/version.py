"""The version of the package, and the versions of torch that it is tested with."""

__version__ = "0.1.0"
TORCH_TESTED = ("2.8", "2.15")  # on CPUs; README.md says which on GPUs


def untested_torch(version: str) -> list[str]:
    """A note, if `version` of torch is outside the tested range; patch releases of its ends are inside."""
    first, last = TORCH_TESTED
    if _minor(first) <= _minor(version) <= _minor(last):
        return []
    return [f"torch {version} is outside the tested range, {first} to {last}: run the tests with it first"]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
