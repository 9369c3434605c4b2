"""Every command that opens checkpoints names a directory of another program, and says what to do with it."""

import re
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.foreign.recognise import recognise
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.train.resume.start import check_start
from tests.checkpoint.foreign.conftest import Tool

LAYOUTS = {
    "mp_rank files": ["iter_0000100/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt=100"],
    "mp_rank files ": ["iter_0000100/mp_rank_00_000/model_optim_rng.pt"],
    "distributed": ["iter_0000100/metadata.json", "iter_0000100/common.pt", "iter_0000100/.metadata"],
    "ZeRO files": ["global_step100/mp_rank_00_model_states.pt", "latest=global_step100"],
    "ZeRO files ": ["global_step100/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "Universal": ["global_step100_universal/zero/a/fp32.pt", "latest_universal=global_step100_universal"],
    "safetensors": ["config.json", "model.safetensors"],
    "pytorch_model.bin": ["config.json", "pytorch_model.bin"],
    ".distcp files": ["step-10/.metadata", "step-10/__0_0.distcp", "step-9/.metadata", "step-9/__0_0.distcp"],
    ".distcp files ": [".metadata", "__0_0.distcp"],
}
PROGRAMS = r"Megatron-LM|DeepSpeed|transformers|torch\.distributed\.checkpoint"
WORDS = rf"is a checkpoint of ({PROGRAMS}) \(.+\); .*megatron-zpp import makes a checkpoint"


@pytest.fixture(params=LAYOUTS)
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "theirs"
    for entry in LAYOUTS[request.param]:
        name, _, text = entry.partition("=")
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def test_the_words_say_what_it_is(foreign: Path, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["foreign"].strip()
    with pytest.raises(ValueError, match=WORDS) as error:
        candidates(str(foreign))
    said = str(error.value)
    if kind != "Universal":
        assert kind in said
    assert "remove" not in said
    assert "damaged" not in said
    with pytest.raises(ValueError, match=WORDS):
        candidates(str(foreign), 100)
    inside = next(iter(sorted(path for path in foreign.iterdir() if path.is_dir())), foreign)
    with pytest.raises(ValueError, match=WORDS):
        candidates(str(inside))
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    with pytest.raises(ValueError, match=f"^--load .*{WORDS}"):
        check_start(CheckpointConfig(load=str(foreign), save=str(foreign)), model, {})


def test_the_newest_step_of_torchtitan_is_named_with_a_way_for_its_weights(
    tmp_path: Path, tool: Tool
) -> None:
    for name in LAYOUTS[".distcp files"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    said = r"step-10 is a checkpoint of torch\.distributed\.checkpoint .*; save its weights in Hugging Face's"
    with pytest.raises(ValueError, match=said):
        candidates(str(tmp_path))
    with pytest.raises(ValueError, match=said):
        tool(tmp_path, tmp_path / "new")


def test_directories_of_ours_and_others_are_not_taken_for_it(tmp_path: Path) -> None:
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "gone") is None
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "manifest.json").write_text("{}")
    (tmp_path / "latest").write_text("../../etc")
    assert recognise(tmp_path) is None
    with pytest.raises(ValueError, match=re.escape("iter_0000001 has no COMMITTED")):
        candidates(str(tmp_path))
