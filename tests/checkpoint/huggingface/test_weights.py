"""Import and export of a model's weights, compared with transformers."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_zpp.checkpoint.huggingface.compare import compare_logits
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.loading import load_model
from megatron_zpp.model.gpt import GPT
from tests.checkpoint.huggingface.gpt2 import SHAPE, check_equal, entries, save, tensors, theirs


def test_import_and_export_change_no_bit(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """Untied, in several files; test_families.py has a tied one."""
    settings = {"tie_word_embeddings": False, "n_inner": 50, "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.0}
    source = save(theirs(bpe, **settings), bpe, tmp_path / "theirs", max_shard_size="9KB")
    assert (source / "model.safetensors.index.json").exists()
    said = tool("import", source, tmp_path / "ours")
    said += tool("export", tmp_path / "ours", tmp_path / "back", "--max-file-gib", "1e-5")
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    assert said.count("logits: largest difference from transformers'") == 2
    check_equal(tensors(tmp_path / "back"), tensors(source))
    before, after = (
        transformers.GPT2Config.from_pretrained(path).to_dict() for path in (source, tmp_path / "back")
    )
    for key in (*SHAPE, "layer_norm_epsilon", "tie_word_embeddings", "activation_function", "resid_pdrop"):
        assert before[key] == after[key], key
    assert (before["n_inner"] or 80) == (after["n_inner"] or 80)


def test_old_files_of_the_bare_model_are_imported(
    tool: Callable[..., str], bpe: Path, tmp_path: Path
) -> None:
    """OpenAI's gpt2 was saved so: no prefix, causal masks beside the weights, half precision."""
    model = theirs(bpe).bfloat16().float()
    source = save(model.transformer.bfloat16(), bpe, tmp_path / "theirs")
    masks = {f"h.{index}.attn.bias": torch.ones(1, 1, 19, 19) for index in range(2)}
    save_file(load_file(source / "model.safetensors") | masks, source / "model.safetensors", {"format": "pt"})
    tool("import", source, tmp_path / "ours", "--make-vocab-size-divisible-by", "7")
    tokens = torch.randint(entries(bpe), (2, 19))
    ours, _ = load_model(str(tmp_path / "ours"), None)
    assert torch.allclose(ours(tokens), model.float()(tokens).logits, atol=1e-5, rtol=1e-5)


def test_without_transformers_only_the_weights_are_compared(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(theirs(bpe), bpe, tmp_path / "theirs")
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    for action, start, end in (
        ("import", source, tmp_path / "ours"),
        ("export", tmp_path / "ours", tmp_path / "back"),
    ):
        said = tool(action, start, end)
        assert "logits are not compared" in said
        assert "pip install transformers" in said
    check_equal(tensors(tmp_path / "back"), tensors(source))


def test_a_wrong_conversion_is_found(bpe: Path, good: Path) -> None:
    """Queries and keys are swapped, so all shapes still fit."""
    with torch.device("meta"):
        model = GPT(
            ModelConfig(num_layers=2, hidden_size=20, num_attention_heads=4, seq_length=19), entries(bpe)
        )
    named = NamedDirectory("HF_DIR", str(good), good)
    with HuggingFaceWeights(named, model.config, entries(bpe)) as opened:
        model.load_state_dict(opened.parameters(), assign=True)
    assert "largest difference" in compare_logits(named, good, lambda: model)
    with torch.no_grad():
        weight = model.layers[1].attention.qkv.weight
        weight.copy_(torch.cat([weight[20:40], weight[:20], weight[40:]]))
    with pytest.raises(ValueError, match="so this conversion is wrong"):
        compare_logits(named, good, lambda: model)
