"""muP: Megatron-LM's rules as numbers, a coordinate check over widths, and a run that is exported."""

import dataclasses
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_zpp.checkpoint.foreign.architecture import read_settings
from megatron_zpp.commands import export_checkpoint
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from megatron_zpp.generate.loading import load_model
from megatron_zpp.model.gpt import GPT
from tests.config.command_line import MINIMAL
from tests.support import logged, trained
from tests.train.conftest import BYTES

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 16}
BASE = {"use_mup": True, "mup_base_hidden_size": 32}


@pytest.mark.parametrize(
    ("given", "scale", "logits"),
    [
        ({"use_mup": True}, 1 / 32, 1.0),  # the base itself
        (BASE, 1 / 32, 1 / 4),
        (BASE | {"mup_base_head_dim": 8.0}, math.sqrt(8) / 32, 1 / 4),
        (BASE | {"mup_attn_scale_power": 0.5}, 1 / math.sqrt(32), 1 / 4),
        (BASE | {"softmax_scale": 0.3, "logits_multiplier": 0.5}, 0.3, 0.5),
    ],
)
def test_multipliers_are_megatron_lms(given: dict, scale: float, logits: float) -> None:
    """Of TransformerConfig's __post_init__; a configuration that was saved gives itself."""
    config = ModelConfig(**SHAPE, **given)
    assert config.softmax_scale == pytest.approx(scale)
    assert config.logits_multiplier == logits
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("untied", [False, True])
def test_initial_weights_and_rates_of_layers_alone_are_scaled(untied: bool) -> None:
    more = {"untie_embeddings_and_output_weights": untied}
    wide = GPT(ModelConfig(**SHAPE, **BASE, **more), 1000).initialize(1)
    usual = GPT(ModelConfig(**SHAPE, **more), 1000).initialize(1)
    for (name, ours), theirs in zip(wide.named_parameters(), usual.parameters(), strict=True):
        scaled = name.startswith("layers.") and ours.dim() == 2
        assert torch.equal(ours, theirs / 2 if scaled else theirs), name
        assert wide.rate_factors().get(name, 1.0) == (1 / 4 if scaled else 1.0), name
    assert not usual.rate_factors()
    assert not GPT(ModelConfig(**SHAPE, use_mup=True), 1000).rate_factors()


def changes(width: int, mup: bool) -> dict[str, float]:
    """The mean change of each activation's elements after 4 steps of AdamW, by its name; "logits" too.

    Initial weights have the same scale with and without muP. Heads widen with the model.
    """
    base: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 8}
    config = ModelConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=4,
        ffn_hidden_size=3 * width,
        seq_length=32,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1 if mup else 0.1 / (width / 32) ** 0.5,
        **(base if mup else {}),
    )
    model = GPT(config, 64).initialize(3)
    factors = model.rate_factors()
    groups = []
    for name, parameter in model.named_parameters():
        factor = factors.get(name, 1.0)
        groups.append({"params": [parameter], "lr": 4e-3 * factor, "eps": 1e-8 * factor})
    adam, seen = torch.optim.AdamW(groups, weight_decay=0.1), dict[str, Tensor]()

    def keep(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[name] = output.detach()

    for index, layer in enumerate(model.layers):
        for name, module in (("attention", layer.attention), ("mlp", layer.mlp), ("layer", layer)):
            module.register_forward_hook(partial(keep, f"{name} {index}"))
    tokens = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(0))
    first = dict[str, Tensor]()
    for _ in range(5):
        logits = model(tokens[:, :-1])
        seen["logits"] = logits.detach()
        first = first or dict(seen)
        adam.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        adam.step()
    return {name: (seen[name] - first[name]).abs().mean().item() for name in seen}


def test_activations_change_by_the_same_at_each_width_with_mup_alone() -> None:
    """A coordinate check (Tensor Programs V, appendix D.1), over 8 times the width."""
    ratios = {}
    for mup in (True, False):
        narrow, wide = (changes(width, mup) for width in (32, 256))
        ratios[mup] = {name: wide[name] / narrow[name] for name in wide}
    assert all(0.4 < ratio < 1.25 for ratio in ratios[True].values()), ratios
    assert all(ratio > 1.7 for ratio in ratios[False].values()), ratios
    assert max(ratios[False].values()) > 4, ratios


def test_flags_are_megatron_lms() -> None:
    typed = (
        "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 --mup-output-mult 0.5 --mup-width-mult 2"
    )
    rope = "--position-embedding-type rope"
    parsed = parse_command_line([*MINIMAL, *typed.split(), *rope.split()])
    model = parsed.config.model
    assert (model.embedding_multiplier, model.logits_multiplier) == (3.0, 0.5)
    assert "--mup-output-mult is --logits-multiplier" in parsed.notes[0]
    for more, said in (
        (typed, "--embedding-multiplier 3.0: scales tokens alone, and muP scales learned"),
        ("--mup-base-hidden-size 8", "--mup-base-hidden-size 8: needs --use-mup"),
        (
            "--use-mup --mup-base-hidden-size 8 --fused-backend apex",
            r"--use-mup \(given\): needs --fused-backend torch",
        ),
    ):
        with pytest.raises(UsageError, match=f"^{said}"):
            parse_args([*MINIMAL, *more.split()])


def test_a_checkpoint_of_megatron_lm_brings_its_multipliers() -> None:
    args = SHAPE | {"max_position_embeddings": 16, "position_embedding_type": "rope"}
    args |= {"mup_base_hidden_size": 32, "mup_embedding_mult": 3.0, "mup_output_mult": 1.0}
    assert not read_settings(Path("theirs"), args, 32).model.use_mup
    model = read_settings(Path("theirs"), args | {"use_mup": True}, 32).model
    assert (model.embedding_multiplier, model.logits_multiplier) == (3.0, 0.25)
    assert model.softmax_scale == 1 / 32


LLAMA = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4
    --lr 3e-3 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --eval-iters 0 --global-batch-size 8 --log-interval 1 --attention-dropout 0 --hidden-dropout 0 --use-mup
    --mup-base-hidden-size 16 --mup-base-head-dim 4 --embedding-multiplier 2""".split()


@pytest.mark.nightly
def test_a_run_resumes_at_another_stage_and_is_exported_with_its_multipliers(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Granite, which has all of them."""
    flags = ["--data-path", corpus, "--split", "100,0,0", *BYTES, *LLAMA, "--lr-decay-style", "constant"]
    losses = []
    for name, stages in (("alone", ((0, 4, 1),)), ("resumed", ((3, 2, 2), (1, 4, 1)))):
        saves = ["--save", f"{tmp_path}/{name}", "--load", f"{tmp_path}/{name}"]
        for stage, steps, ranks in stages:
            more = ["--zero-stage", f"{stage}", "--train-iters", f"{steps}"]
            metrics = tmp_path / f"{name}.jsonl"
            out = trained(*flags, *saves, *more, "--metrics-file", str(metrics), processes=ranks)
            assert "WARNING: --" not in out
        losses.append(logged(metrics))
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    monkeypatch.setattr(sys, "argv", ["export", f"{tmp_path}/resumed", f"{tmp_path}/out"])
    export_checkpoint.main()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.model_type == "granite"
    assert exported.config.logits_scaling == 4
    ours, _ = load_model(f"{tmp_path}/resumed", None)
    tokens = torch.randint(256, (2, 19))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), exported(tokens).logits, atol=1e-5, rtol=1e-5)
