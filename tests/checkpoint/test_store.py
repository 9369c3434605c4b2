"""Checkpoints: what is saved comes back, what is damaged is named, a kill leaves the previous one."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.store import (
    TRACKER,
    Progress,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.storage.files import check_writable, write_text
from megatron_zpp.zero.engine import ZeroEngine
from tests.support import ROOT, environment
from tests.zero.engines import engine_of, weights_of

TOKENIZER = {"tokenizer_type": "NullTokenizer", "vocab_size": 50, "eod": 49, "fingerprint": "f" * 64}
FIRST, SECOND = Progress(5, 50), Progress(10, 100)


def small(hidden: int = 32, seed: int = 1, precision: PrecisionConfig | None = None) -> ZeroEngine:
    config = ModelConfig(num_layers=2, hidden_size=hidden, num_attention_heads=4, seq_length=8)
    return engine_of(config, 50, seed=seed, precision=precision)


def train(engine: ZeroEngine, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    norms = []
    for _ in range(steps):
        torch.manual_seed(seed)
        engine.accumulate(torch.randint(50, (2, 9), generator=generator), index=0, micro_batches=1)
        norms.append(engine.step(1e-2).grad_norm.item())
    return norms


def save(
    directory: Path, engine: ZeroEngine, progress: Progress = FIRST, with_optimizer: bool = True
) -> Path:
    return save_checkpoint(
        str(directory),
        engine,
        progress,
        config={"note": "π"},
        tokenizer=TOKENIZER,
        with_optimizer=with_optimizer,
    )


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(), PrecisionConfig(bf16=True), PrecisionConfig(fp16=True, initial_loss_scale=256.0)],
    ids=["fp32", "bf16", "fp16"],
)
def test_a_loaded_engine_goes_on_bit_for_bit(tmp_path: Path, precision: PrecisionConfig) -> None:
    engine = small(precision=precision)
    train(engine, 3, seed=2)
    path = save(tmp_path, engine)
    other = small(seed=99, precision=precision)
    assert load_checkpoint(path, other, TOKENIZER, with_optimizer=True) == FIRST
    assert train(other, 3, seed=4) == train(engine, 3, seed=4)
    assert other.loss_scale.state() == engine.loss_scale.state()
    for name, weight in engine.states("weights"):
        assert torch.equal(weights_of(other)[name], weight), name


def test_without_the_optimizer_only_weights_come_back(tmp_path: Path) -> None:
    engine = small()
    train(engine, 2, seed=2)
    path = save(tmp_path, engine, with_optimizer=False)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", "weights.safetensors"]
    other = small(seed=99)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=False)
    assert other.optimizer_steps == 0
    assert all(torch.equal(weights_of(other)[name], weight) for name, weight in engine.states("weights"))
    with pytest.raises(ValueError, match="--no-load-optim"):
        load_checkpoint(path, other, TOKENIZER, with_optimizer=True)


def test_the_newest_is_found_and_any_can_be_named(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) is None
    first, second = save(tmp_path, small()), save(tmp_path, small(), SECOND)
    assert find_checkpoint(str(tmp_path)) == second
    assert find_checkpoint(str(tmp_path), 5) == first
    with pytest.raises(ValueError, match=r"--ckpt-step 7: .* iterations there: 5, 10"):
        find_checkpoint(str(tmp_path), 7)


@pytest.mark.parametrize("tracker", [None, "", "garbage", "11", "-5", "5\0"])
def test_a_tracker_that_does_not_fit_is_an_error_not_a_fresh_start(
    tmp_path: Path, tracker: str | None
) -> None:
    save(tmp_path, small())
    if tracker is None:
        (tmp_path / TRACKER).unlink()
    else:
        (tmp_path / TRACKER).write_text(tracker)
    with pytest.raises(ValueError, match=TRACKER):
        find_checkpoint(str(tmp_path))


def test_saving_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, small(seed=1))
    path = save(tmp_path, small(seed=2))
    other = small(seed=3)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    assert torch.equal(*(weights_of(e)["layers.0.mlp.input.weight"] for e in (other, small(seed=2))))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def test_another_model_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, small())
    with pytest.raises(ValueError, match=r"has shape .*, this model needs"):
        load_checkpoint(path, small(hidden=64), TOKENIZER, with_optimizer=True)
    with pytest.raises(ValueError, match="tokenizer"):
        load_checkpoint(path, small(), {**TOKENIZER, "fingerprint": "0" * 64}, with_optimizer=True)


@pytest.mark.parametrize("name", ["state.json", "weights.safetensors", "moments.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    engine = small()
    train(engine, 1, seed=2)
    path = save(tmp_path, engine)
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        damaged = {"empty": b"", "truncated": content[: len(content) // 2], "garbage": b"\xff" * 64}
        (path / name).write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=name) as caught:
        load_checkpoint(path, small(), TOKENIZER, with_optimizer=True)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, small()) / "state.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format version 2"):
        read_state(path.parent)


SAVE_FOREVER = """
import sys
from pathlib import Path
from megatron_zpp.checkpoint.store import Progress
from tests.checkpoint.test_store import save, small, train
engine = small()
train(engine, 1, seed=2)
print("ready", flush=True)
for iteration in range(1, 10**6):
    save(Path(sys.argv[1]), engine, Progress(iteration % 3 + 1, iteration))
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(5)
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
        )
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.05 + moments.random() / 10)
        child.send_signal(signal.SIGKILL)
        child.wait()
        newest = find_checkpoint(str(tmp_path))
        if newest is None:
            continue  # killed before the first was whole
        engine = small(seed=9)
        load_checkpoint(newest, engine, TOKENIZER, with_optimizer=True)
        assert engine.optimizer_steps == 1


def test_files_follow_the_umask(tmp_path: Path) -> None:
    path = save(tmp_path, small())
    modes = {file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert len(modes) == 1


def test_an_unwritable_directory_is_refused_by_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^--save .*/file/below: "):
        check_writable("--save", str(tmp_path / "file" / "below"))
    check_writable("--save", str(tmp_path / "new" / "deep"))
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "two"
