"""A checkpoint of each model for all tests of generation and scores."""

from pathlib import Path

import pytest
import transformers

from megatron_zpp.generate.loading import load_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import as_transformers, make_checkpoint
from tests.support import nightly


@pytest.fixture(scope="session", params=["llama", nightly("gpt2")])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A directory of checkpoints that two ranks have written. In CI test_batch.py has learned positions."""
    return make_checkpoint(tmp_path_factory.mktemp("generate"), request.param)


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> tuple[GPT, Tokenizer]:
    return load_model(str(checkpoint), None)


@pytest.fixture
def model(loaded: tuple[GPT, Tokenizer]) -> GPT:
    return loaded[0]


@pytest.fixture
def tokenizer(loaded: tuple[GPT, Tokenizer]) -> Tokenizer:
    return loaded[1]


@pytest.fixture
def theirs(model: GPT) -> "transformers.PreTrainedModel":
    """transformers' model with the checkpoint's weights."""
    return as_transformers(model)
