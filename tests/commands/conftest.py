"""A checkpoint of each model, as tests of generation have it."""

from tests.generate.conftest import checkpoint, loaded  # noqa: F401
