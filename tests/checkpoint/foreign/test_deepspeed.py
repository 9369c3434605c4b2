"""DeepSpeed's layouts, written here by their description, give megatron-core's logits.

DeepSpeed itself is not needed: its files are made from megatron-core's weights, shared as ZeRO shares them.
"""

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.generate.loading import load_model
from tests.checkpoint.foreign.conftest import Saved
from tests.checkpoint.foreign.imports import TOKENIZER, assert_same_logits, run_import
from tests.checkpoint.foreign.test_megatron import legacy, nested

DATA_RANKS = 3  # does not divide the sizes


def weights(root: Path, rank: int) -> tuple[dict[str, Tensor], Any]:
    """A tensor rank's weights by Megatron-DeepSpeed's names, and the args."""
    file = root / f"ranks/iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    return {legacy(name): value for name, value in state["model"].items() if value is not None}, state["args"]


def padded(flat: Tensor, multiple: int) -> Tensor:
    return torch.cat([flat, torch.full((-len(flat) % multiple,), 1e9)])


def stage_2(flat: dict[str, Tensor]) -> tuple[list[OrderedDict], list[dict[str, Any]]]:
    """Shapes by group, and each data rank's part: groups of weights with and without decay, end to end."""
    groups = [
        OrderedDict((name, value) for name, value in flat.items() if (value.dim() > 1) == decayed)
        for decayed in (True, False)
    ]
    parts: list[dict[str, Any]] = [
        {"zero_stage": 2, "partition_count": [DATA_RANKS] * 2, "single_partition_of_fp32_groups": []}
        for _ in range(DATA_RANKS)
    ]
    for group in groups:
        whole = padded(torch.cat([value.flatten() for value in group.values()]), 2 * DATA_RANKS)
        for part, own in zip(parts, whole.chunk(DATA_RANKS), strict=True):
            part["single_partition_of_fp32_groups"].append(own.clone())
    return [OrderedDict((name, value.shape) for name, value in group.items()) for group in groups], parts


def stage_3(flat: dict[str, Tensor]) -> tuple[list[OrderedDict], list[dict[str, Any]]]:
    """As `stage_2`; each parameter is cut by itself, and a rank's flat groups lie end to end."""
    cut = [padded(value.flatten(), DATA_RANKS).chunk(DATA_RANKS) for value in flat.values()]
    parts = []
    for rank in range(DATA_RANKS):
        whole = torch.cat([pieces[rank] for pieces in cut])
        groups = [whole[:1000].clone(), whole[1000:].clone()]  # the first ends inside of a parameter
        parts.append({"zero_stage": 3, "partition_count": DATA_RANKS, "fp32_flat_groups": groups})
    return [OrderedDict((name, value.shape) for name, value in flat.items())], parts


def write_zero(root: Path, target: Path, stage: int, ranks: int) -> None:
    """global_step7 of a stage; the module's own weights are rounded to bf16, and absent at stage 3."""
    step = target / "global_step7"
    step.mkdir(parents=True)
    (target / "latest").write_text("global_step7")
    for rank in range(ranks):
        flat, args = weights(root, rank)
        shapes, parts = stage_3(flat) if stage == 3 else stage_2(flat)
        rounded = {name: value.to(torch.bfloat16) for name, value in flat.items()}
        module = {name: torch.empty(0) for name in flat} if stage == 3 else nested(rounded)
        state = {
            "module": module,
            "args": args,
            "iteration": 7,
            "param_shapes": shapes,
            "ds_version": "0.16.0",
        }
        for data_rank, part in enumerate(parts):
            prefix = f"zero_pp_rank_{data_rank}_" if stage == 3 else ""
            torch.save(state, step / f"{prefix}mp_rank_{rank:02d}_model_states.pt")
            name = f"bf16_zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": part}, step / name)


@pytest.mark.parametrize(
    ("family", "stage", "ranks"), [("gpt", 2, 2), ("gpt", 3, 1), ("llama", 2, 1), ("llama", 3, 2)]
)
def test_fp32_weights_are_joined_from_data_and_tensor_ranks(
    saved: Saved,
    family: str,
    stage: int,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = saved(family, ranks)
    write_zero(root, tmp_path / "theirs", stage, ranks)
    said = run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
    assert "global_step7: DeepSpeed (ZeRO files), iteration 7\n" in said
    assert "left out: the optimizer's moments: they start at zero" in said
    assert_same_logits(tmp_path / "new", root)
    (tmp_path / "theirs/global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"has optim_states of data ranks \[0, 2\]; copy all of them"):
        run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "newer", *TOKENIZER)


def test_the_rotary_base_is_read_by_megatron_deepspeeds_name(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--rotary-position-embeddings-theta is `rope_theta` in its args, and there is no `rotary_base`."""
    root = saved("llama", 1)
    write_zero(root, tmp_path / "theirs", 2, 1)
    file = tmp_path / "theirs/global_step7/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["args"].rope_theta = 500_000
    with_both = dict(vars(state["args"]))
    del state["args"].rotary_base
    torch.save(state, file)
    run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
    model, _ = load_model(str(tmp_path / "new"), None)
    assert model.config.rotary_base == 500_000
    state["args"] = Namespace(**with_both)
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"its args say rotary_base 10000 and rope_theta 500000, two names"):
        run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "newer", *TOKENIZER)


def test_without_optimizer_files_the_weights_are_the_modules(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved("gpt", 2)
    write_zero(root, tmp_path / "theirs", 2, 2)
    for file in (tmp_path / "theirs/global_step7").glob("*optim_states.pt"):
        file.unlink()
    said = run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
    assert "left out: fp32 weights: there are no optim_states files" in said
    assert_same_logits(tmp_path / "new", root, tolerance=0.02)  # bf16 rounds weights by up to 2^-9


@pytest.mark.parametrize("pipeline", [1, 2])
def test_layer_files_of_the_pipeline_module(
    saved: Saved,
    pipeline: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Layer 1 is the embedding, 3 and 4 are transformer layers, 6 the last norm, 7 the output."""
    root, step = saved("llama", 2), tmp_path / "theirs/global_step7"
    step.mkdir(parents=True)
    for rank in range(2):
        flat, args = weights(root, rank)
        state = {"module": None, "args": args, "iteration": 7}
        for stage in range(pipeline):
            torch.save(state, step / f"mp_rank_{2 * stage + rank:02d}_model_states.pt")
        files: dict[int, dict[str, Tensor]] = {}
        for name, value in flat.items():
            rest = name.removeprefix("language_model.")
            if rest.startswith("encoder.layers."):
                _, _, layer, rest = rest.split(".", 3)
                files.setdefault(3 + int(layer), {})[rest] = value
            elif rest.startswith("embedding."):
                files.setdefault(1, {})[rest.removeprefix("embedding.")] = value
            elif rest.startswith("encoder.final"):
                files.setdefault(6, {})["weight"] = value
            else:
                files.setdefault(7, {})["lm_head.weight"] = value
        for layer, values in files.items():
            torch.save(values, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
    assert_same_logits(tmp_path / "new", root)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_universal_checkpoints(
    saved: Saved,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, step = saved(family, 1), tmp_path / "theirs/global_step7_universal"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/latest_universal").write_text("global_step7_universal")
    flat, args = weights(root, 0)
    for name, value in flat.items():
        (step / "zero" / name).mkdir(parents=True)
        whole = value[:90] if "word_embeddings" in name else value  # without its padding
        torch.save({"param": whole, "cat_dim": 0}, step / "zero" / name / "fp32.pt")
    torch.save({"args": args, "iteration": 7}, step / "mp_rank_00_model_states.pt")
    said = run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
    assert "global_step7_universal: DeepSpeed (Universal), iteration 7" in said
    assert_same_logits(tmp_path / "new", root)


def test_a_model_of_transformers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "theirs/global_step7"
    step.mkdir(parents=True)
    module = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}
    torch.save({"module": module}, step / "mp_rank_00_model_states.pt")
    with pytest.raises(
        ValueError, match=r"of a model of transformers, .* zero_to_fp32\.py with --safe_serialization"
    ):
        run_import(monkeypatch, capsys, tmp_path / "theirs", "--output", tmp_path / "new", *TOKENIZER)
