"""Where the sources of compiled libraries are."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def csrc() -> Path:
    """Return csrc/: inside an installed package, and beside the package in the repository."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.with_name("csrc")
