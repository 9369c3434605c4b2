"""Checkpoints that megatron-core wrote give the same logits here, at one and at two tensor ranks."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.foreign.conftest import Saved
from tests.checkpoint.foreign.imports import TOKENIZER, assert_same_logits, run_import


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [("gpt", 1, "dist"), ("llama", 2, "dist"), ("gpt", 2, "ranks"), ("llama", 1, "ranks")],
)
def test_logits_are_those_of_megatron_core(
    saved: Saved,
    family: str,
    ranks: int,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, target = saved(family, ranks), tmp_path / "new"
    flags = ("--from", "megatron", root / layout, "--output", target, "--make-vocab-size-divisible-by", 32)
    said = run_import(monkeypatch, capsys, *flags, *TOKENIZER)
    kind = "torch_dist" if layout == "dist" else "mp_rank files"
    assert f"iter_0000007: Megatron-LM ({kind}), iteration 7\n" in said
    assert re.search(
        r"layers\.\*\.self_attention\.linear_qkv\.weight +-> layers\.\*\.attention\.qkv\.weight\n", said
    )
    assert "vocabulary: 90 entries; 128 rows there, 96 here" in said
    assert "--num-layers 2 --hidden-size 64" in said
    assert_same_logits(target, root)


def legacy(name: str) -> str:
    """The name of a tensor of megatron-core's in Megatron-LM's legacy models."""
    for new, old in (
        ("decoder.", "encoder."),
        ("linear_qkv", "query_key_value"),
        ("linear_proj", "dense"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
        ("linear_fc1", "dense_h_to_4h"),
        ("linear_fc2", "dense_4h_to_h"),
    ):
        name = name.replace(new, old)
    return f"language_model.{name}"


def nested(flat: dict[str, torch.Tensor]) -> dict[str, object]:
    """As legacy models save themselves: dictionaries down to the encoder, and names below it."""
    found: dict[str, dict] = {"language_model": {"embedding": {}, "encoder": {}}}
    for name, tensor in flat.items():
        _, part, rest = name.split(".", 2)
        if part == "embedding":
            module, leaf = rest.split(".")
            found["language_model"]["embedding"][module] = {leaf: tensor}
        else:
            found["language_model"].setdefault(part, {})[rest] = tensor
    return found


def test_legacy_names_in_nested_dictionaries_and_pipeline_stages(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved("gpt", 2)
    for rank in range(2):
        source = root / f"ranks/iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt"
        state = torch.load(source, weights_only=False)
        flat = {legacy(name): value for name, value in state["model"].items() if value is not None}
        stages: list[dict[str, torch.Tensor]] = [{}, {}]
        for name, tensor in flat.items():
            last = ".layers.1." in name or "final" in name or "output_layer" in name
            stages[last][name.replace(".layers.1.", ".layers.0.")] = tensor
        for stage, tensors in enumerate(stages):
            folder = tmp_path / f"old/iter_0000007/mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            optimizer = {"optimizer": {"state": {0: torch.zeros(3)}}}
            torch.save(state | {"model": nested(tensors)} | optimizer, folder / "model_optim_rng.pt")
    said = run_import(monkeypatch, capsys, tmp_path / "old", "--output", tmp_path / "new", *TOKENIZER)
    assert "left out: the optimizer's state, with its fp32 weights: moments start at zero" in said
    assert_same_logits(tmp_path / "new", root)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        run_import(monkeypatch, capsys, *TOKENIZER, *argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_refused(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(directory: Path, *more: object) -> str:
        return refused(monkeypatch, capsys, directory, "--output", tmp_path / "new", *more)

    old, new = saved("llama", 2) / "ranks", saved("llama", 2) / "dist"
    assert "--from deepspeed: iter_0000007 is a checkpoint of Megatron-LM" in say(old, "--from", "deepspeed")
    assert "--ckpt-step 8: not in" in say(old, "--ckpt-step", 8)
    assert "has 128 rows, and this NullTokenizer has 201 entries" in say(old, "--vocab-size", 200)
    assert "holds no checkpoint of Megatron-LM or DeepSpeed" in say(tmp_path)

    def changed(change: dict[str, object], **args: object) -> Path:
        directory = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
        shutil.copytree(old, directory)
        for file in directory.glob("*/*/*.pt"):
            state = torch.load(file, weights_only=False)
            vars(state["args"]).update(args)
            torch.save(state | change, file)
        return directory

    assert "holds iteration 8, not 7" in say(changed({"iteration": 8}))
    assert "checkpoint_version 1.0; load and save it" in say(changed({"checkpoint_version": 1.0}))
    assert "num_experts 8, which this program does not have" in say(changed({}, num_experts=8))
    assert "has position_embedding_type alibi; must be" in say(changed({}, position_embedding_type="alibi"))
    assert "args ask for (192, 64)" in say(changed({}, num_query_groups=4))
    assert "does not have the last of them" in say(changed({}, num_layers=3))
    assert "layers.1.attention.output.weight, which is no part" in say(changed({}, num_layers=1))
    one_rank = changed({})
    shutil.rmtree(one_rank / "iter_0000007/mp_rank_00")
    assert "has no file of tensor rank 0, pipeline rank 0" in say(one_rank)
    cut = tmp_path / "cut"
    shutil.copytree(new, cut)
    file = next((cut / "iter_0000007").glob("__*.distcp"))
    file.write_bytes(file.read_bytes()[:-2000])
    assert "not a whole file of torch.save" in say(cut)
    assert not (tmp_path / "new").exists()
