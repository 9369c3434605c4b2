"""Runs that start from Hugging Face's weights, and the export of a run's checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.generate.loading import load_model
from tests.checkpoint.huggingface.gpt2 import SHAPE_FLAGS, SOURCE, check_equal, save, theirs
from tests.model.families import ours as imported
from tests.support import trained
from tests.tokenizer.test_tokenizers import ORDINARY


def test_a_run_is_exported(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """The files contain the weights of a run on two ranks, and AutoTokenizer returns its ids."""
    flags = [*SHAPE_FLAGS, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(bpe)]
    flags += "--zero-stage 3 --train-iters 2 --lr 1e-2 --save".split()
    trained(*flags, str(tmp_path / "run"), processes=2)
    assert "logits: largest difference from" in tool("export", tmp_path / "run", tmp_path / "out")
    model, tokenizer = load_model(str(tmp_path / "run"), None)
    again = dict(imported(tmp_path / "out").named_parameters())
    assert len(again) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        rows = tokenizer.vocab_size if name == "embedding.tokens.weight" else len(parameter)
        assert torch.equal(again[name][:rows], parameter[:rows]), name
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert auto.eos_token_id == tokenizer.eod
    assert len(auto) == tokenizer.vocab_size
    for text in [*ORDINARY, SOURCE]:
        ids = auto.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode(text)
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert auto.encode(auto.eos_token, add_special_tokens=False) == [tokenizer.eod]


def test_a_run_with_equal_save_and_load_starts_from_the_import_and_resumes(
    tool: Callable[..., str], bpe: Path, tmp_path: Path
) -> None:
    """As the launchers do: the first start reads the import, the next one the optimizer's states too."""
    source = save(theirs(bpe), bpe, tmp_path / "theirs")
    flags = "--use-checkpoint-args --mock-data --micro-batch-size 2 --eval-iters 1 --num-workers 0".split()
    flags += "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-style constant".split()
    weights = []
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        tool("import", source, tmp_path / name)
        for length in lengths:
            named = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
            said = trained(*flags, *named, "--train-iters", str(length))
            assert "resuming at iteration " + ("2, " if length != lengths[0] else "0, 0 samples") in said
        with CheckpointReader(candidates(str(tmp_path / name))[0]) as reader:
            assert reader.state["with_optimizer"]
            weights.append(reader.parameters())
    check_equal(*weights)


def test_an_export_touches_nothing_beside_its_directory(
    tool: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    """It removes what a killed export left, and no directory of the user."""
    tool("import", good, tmp_path / "run")
    kept = [tmp_path / name / "config.json" for name in ("out.partial", "out.retired")]
    left = tmp_path / ".out.megatron_zpp-export.partial" / "config.json"
    for path in (*kept, left):
        path.parent.mkdir()
        path.write_text("mine")
    (tmp_path / "out").mkdir()  # an empty one is replaced
    tool("export", tmp_path / "run", tmp_path / "out")
    assert [path.read_text() for path in kept] == ["mine", "mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", "out.partial", "out.retired"}
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")


def test_an_export_that_could_not_get_its_name_is_refused(
    tool: Callable[..., str], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("import", good, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere")
    for name, said in ((".", "has no name that an export can get"), ("dangling", "is a symbolic link")):
        with pytest.raises(ValueError, match=f"^HF_DIR {name}: {said}; name a new directory$"):
            tool("export", tmp_path / "run", name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "run"]
