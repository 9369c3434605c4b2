"""Directories that are not the GPT-2 that they claim to be: the import names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import refusal


def configured(**settings: object) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return harm


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        there = load_file(directory / "model.safetensors")
        change(there)
        save_file(there, directory / "model.safetensors", {"format": "pt"})

    return harm


def moved(to: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "model.safetensors").rename(directory / to)


def indexed(weight_map: object) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        moved("a.safetensors")(directory)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return harm


REFUSALS = [
    (configured(model_type="bert"), 'model_type is "bert"; must be one of gpt2, bloom, llama'),
    (
        configured(activation_function="relu"),
        'activation_function "relu" is not supported; must be "gelu_new"',
    ),
    (
        configured(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx true is not supported",
    ),
    (configured(n_head=3), "must divide --hidden-size 20"),
    (configured(n_layer=3), "has no tensor h.2."),
    (configured(n_layer=1), "its tensor h.1."),
    (configured(n_inner=40), "mlp.c_fc.weight has shape (20, 80); config.json asks for (20, 40)"),
    (configured(n_positions=20), "wpe.weight has shape (19, 20); config.json asks for (20, 20)"),
    (configured(n_layer="2"), 'n_layer is "2"; must be a positive integer'),
    (configured(layer_norm_epsilon=None), "layer_norm_epsilon is null; must be a number"),
    (configured(tie_word_embeddings=1), "tie_word_embeddings is 1; must be true or false"),
    (configured(tie_word_embeddings=False), "has no tensor lm_head.weight"),
    (configured(vocab_size=50), "has vocab_size 50, but this HuggingFaceTokenizer has"),
    (weights(lambda there: there.update(score=torch.ones(2))), "its tensor score is no part of the model"),
    (
        weights(lambda there: there.update({"ln_f.bias": torch.ones(20)})),
        "has ln_f.bias twice, the second time",
    ),
    (weights(lambda there: there.pop("transformer.ln_f.bias")), "has no tensor ln_f.bias"),
    (
        weights(lambda there: there.update({"transformer.ln_f.bias": torch.ones(20, dtype=torch.float64)})),
        "ln_f.bias is F64; must be one of F32",
    ),
    (
        weights(lambda there: there.update({"lm_head.weight": 2 * there["transformer.wte.weight"]})),
        "lm_head.weight is not wte.weight",
    ),
    (moved("pytorch_model.bin"), "its weights are pickled (.bin)"),
    (moved("weights.safetensors"), "holds neither model.safetensors nor"),
    (indexed({"x": "gone.safetensors"}), "gone.safetensors: missing"),
    (indexed({"x": "a.safetensors"}), "a.safetensors has no tensor x"),
    (indexed({"x": "../a.safetensors"}), "x is in no file beside it"),
    (indexed({"x": "a\0"}), "x is in no file beside it"),
    (indexed(7), "has no weight_map"),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(b"\0" * 99),
        "not a whole safetensors file",
    ),
    (lambda directory: (directory / "config.json").write_text("{"), "not JSON"),
    (lambda directory: (directory / "config.json").unlink(), "holds no model of transformers"),
]


@pytest.mark.parametrize(("harm", "said"), REFUSALS, ids=[said for _, said in REFUSALS])
def test_a_directory_that_is_not_the_described_gpt2_is_refused(
    tool: Callable[..., str], good: Path, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    """The error is one line that names the directory, and no files are left behind."""
    source = tmp_path / "gpt2"
    shutil.copytree(good, source)
    harm(source)
    error = refusal(tool, "import", source, tmp_path / "new")
    assert error.startswith(f"SOURCE {source}")
    assert said in error
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]
