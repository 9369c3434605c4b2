"""Checkpoints that megatron-core wrote give the same logits here, at one and at two tensor ranks.

So do DeepSpeed's layouts, made here of megatron-core's weights, which are shared as ZeRO shares them.
"""

import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_zpp.generate.loading import load_model
from tests.checkpoint.foreign.conftest import Saved, Tool
from tests.support import refusal


def assert_same_logits(imported: Path, reference: Path, tolerance: float = 1e-5) -> None:
    """The model of `imported` gives the logits in `reference`, in fp32."""
    expected = load_file(reference / "logits.safetensors")
    model, tokenizer = load_model(str(imported), None)
    with torch.inference_mode():
        found = model(expected["tokens"])[..., : tokenizer.vocab_size]
    assert expected["logits"].abs().max() > 0.3  # a model of zeros would agree with another
    assert (found - expected["logits"]).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [("gpt", 1, "dist"), ("llama", 2, "dist"), ("gpt", 2, "ranks"), ("llama", 1, "ranks")],
)
def test_logits_are_those_of_megatron_core(
    saved: Saved, family: str, ranks: int, layout: str, tmp_path: Path, tool: Tool
) -> None:
    root, target = saved(family, ranks), tmp_path / "new"
    flags = ("--from", "megatron", root / layout, target, "--make-vocab-size-divisible-by", 32)
    said = tool(*flags)
    kind = "torch_dist" if layout == "dist" else "mp_rank files"
    assert f"iter_0000007: Megatron-LM ({kind}), iteration 7\n" in said
    assert re.search(
        r"layers\.\*\.self_attention\.linear_qkv\.weight +-> layers\.\*\.attention\.qkv\.weight\n", said
    )
    assert "vocabulary: 90 entries; 128 rows there, 96 here" in said
    assert f"--use-checkpoint-args gives a run with --load {target} its model and tokenizer\n" in said
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
    saved: Saved, tmp_path: Path, tool: Tool
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
    said = tool(tmp_path / "old", tmp_path / "new")
    assert "left out: the optimizer's state, with its fp32 weights: moments start at zero" in said
    assert_same_logits(tmp_path / "new", root)


def test_what_does_not_fit_is_refused(saved: Saved, tmp_path: Path, tool: Tool) -> None:
    def say(directory: Path, *more: object) -> str:
        return refusal(tool, directory, tmp_path / "new", *more)

    old, new = saved("llama", 2) / "ranks", saved("llama", 2) / "dist"
    assert "--from deepspeed: iter_0000007 is a checkpoint of Megatron-LM" in say(old, "--from", "deepspeed")
    assert "--ckpt-step 8: not in" in say(old, "--ckpt-step", 8)
    assert "has 128 rows, and this NullTokenizer has 201 entries" in say(old, "--vocab-size", 200)
    assert "holds no model of transformers, Megatron-LM or DeepSpeed" in say(tmp_path)

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
    assert "has position_embedding_type mrope; must be" in say(changed({}, position_embedding_type="mrope"))
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
        state = {"module": module, "args": args, "iteration": 7}
        state |= {"param_shapes": shapes, "ds_version": "0.16.0"}
        for data_rank, part in enumerate(parts):
            prefix = f"zero_pp_rank_{data_rank}_" if stage == 3 else ""
            torch.save(state, step / f"{prefix}mp_rank_{rank:02d}_model_states.pt")
            name = f"bf16_zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": part}, step / name)


@pytest.mark.parametrize(
    ("family", "stage", "ranks"), [("gpt", 2, 2), ("gpt", 3, 1), ("llama", 2, 1), ("llama", 3, 2)]
)
def test_fp32_weights_are_joined_from_data_and_tensor_ranks(
    saved: Saved, family: str, stage: int, ranks: int, tmp_path: Path, tool: Tool
) -> None:
    root = saved(family, ranks)
    write_zero(root, tmp_path / "theirs", stage, ranks)
    said = tool(tmp_path / "theirs", tmp_path / "new")
    assert "global_step7: DeepSpeed (ZeRO files), iteration 7\n" in said
    assert "left out: the optimizer's moments: they start at zero" in said
    assert_same_logits(tmp_path / "new", root)
    (tmp_path / "theirs/global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"has optim_states of data ranks \[0, 2\]; copy all of them"):
        tool(tmp_path / "theirs", tmp_path / "newer")


def test_without_optimizer_files_the_weights_are_the_modules(
    saved: Saved, tmp_path: Path, tool: Tool
) -> None:
    root = saved("gpt", 2)
    write_zero(root, tmp_path / "theirs", 2, 2)
    for file in (tmp_path / "theirs/global_step7").glob("*optim_states.pt"):
        file.unlink()
    said = tool(tmp_path / "theirs", tmp_path / "new")
    assert "left out: fp32 weights: there are no optim_states files" in said
    assert_same_logits(tmp_path / "new", root, tolerance=0.02)  # bf16 rounds weights by up to 2^-9


@pytest.mark.parametrize("pipeline", [1, 2])
def test_layer_files_of_the_pipeline_module(saved: Saved, pipeline: int, tmp_path: Path, tool: Tool) -> None:
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
    tool(tmp_path / "theirs", tmp_path / "new")
    assert_same_logits(tmp_path / "new", root)


def test_universal_checkpoints(saved: Saved, tmp_path: Path, tool: Tool) -> None:
    root, step = saved("llama", 1), tmp_path / "theirs/global_step7_universal"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/latest_universal").write_text("global_step7_universal")
    flat, args = weights(root, 0)
    for name, value in flat.items():
        (step / "zero" / name).mkdir(parents=True)
        whole = value[:90] if "word_embeddings" in name else value  # without its padding
        torch.save({"param": whole, "cat_dim": 0}, step / "zero" / name / "fp32.pt")
    torch.save({"args": args, "iteration": 7}, step / "mp_rank_00_model_states.pt")
    said = tool(tmp_path / "theirs", tmp_path / "new")
    assert "global_step7_universal: DeepSpeed (Universal), iteration 7" in said
    assert_same_logits(tmp_path / "new", root)


def test_a_model_of_transformers_is_named(tmp_path: Path, tool: Tool) -> None:
    step = tmp_path / "theirs/global_step7"
    step.mkdir(parents=True)
    module = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}
    torch.save({"module": module}, step / "mp_rank_00_model_states.pt")
    with pytest.raises(
        ValueError, match=r"of a model of transformers, .* zero_to_fp32\.py with --safe_serialization"
    ):
        tool(tmp_path / "theirs", tmp_path / "new")
