"""A checkpoint has its tokenizer in it: programs read it from any directory, with the original files gone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.generate.loading import load_model
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer import describe
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.checkpoint.saving import TOKENIZER, flip, save, seal, small
from tests.train.in_process import train_here

SHAPE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data".split()
STEPS = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1".split()
TEXT = "The quick brown fox jumps over the lazy dog; naïve 東京."
FILES = {
    "SentencePieceTokenizer": ["tokenizer.model"],
    "GPT2BPETokenizer": ["merges.txt", "vocab.json"],
    "HuggingFaceTokenizer": ["tokenizer.json", "tokenizer_config.json"],
    "NullTokenizer": [],
}


def flags_of(kind: str, directory: Path) -> list[str]:
    """Flags of a tokenizer whose files are made in a directory."""
    directory.mkdir()
    train_bpe(directory, [f"{TEXT} {__doc__}"])
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (directory / "sp.model").write_bytes(train_sentencepiece([f"{TEXT} {__doc__}"] * 30, 300, "bpe"))
    flags = {
        "SentencePieceTokenizer": f"--tokenizer-model {directory}/sp.model",
        "GPT2BPETokenizer": f"--vocab-file {directory}/vocab.json --merge-file {directory}/merges.txt",
        "HuggingFaceTokenizer": f"--tokenizer-model {directory}",
        "NullTokenizer": "--vocab-size 300",
    }
    return ["--tokenizer-type", kind, *flags[kind].split()]


def saved_with(kind: str, directory: Path) -> Path:
    """The checkpoint of DIRECTORY/run, whose tokenizer's files are in DIRECTORY/files."""
    words = flags_of(kind, directory / "files")
    train_here([*SHAPE, *STEPS, *words, "--save", str(directory / "run")])
    return directory / "run" / "iter_0000001"


@pytest.mark.parametrize("kind", FILES)
def test_programs_read_it_after_the_original_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Callable[..., str], kind: str
) -> None:
    path = saved_with(kind, tmp_path)
    shards = "rank_00000.safetensors"
    beside = {"COMMITTED", "manifest.json", shards, f"{shards}.sha256", STATE}
    assert sorted({file.name for file in path.iterdir()} - beside) == FILES[kind]
    _, before = load_model(str(tmp_path / "run"), None)
    shutil.rmtree(tmp_path / "files")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, tokenizer = load_model("../run", None)
    assert describe(tokenizer) == describe(before)
    text = TEXT if kind != "NullTokenizer" else "1 2 3"
    assert tokenizer.encode(text) == before.encode(text)
    argv = ["--load", "../run", "--device", "cpu", "--max-new-tokens", "2", "--prompt", text]
    assert text in tool("sample", *argv)
    said = tool("export", "../run", "exported")
    assert ("no tokenizer is written" in said) == (kind == "NullTokenizer")
    assert (tmp_path / "elsewhere/exported/tokenizer.json").exists() == bool(FILES[kind])


def test_damage_in_a_tokenizers_file_is_found(tmp_path: Path) -> None:
    file = saved_with("SentencePieceTokenizer", tmp_path) / "tokenizer.model"
    flip(file, 800)
    with pytest.raises(ValueError, match=r"--load .*tokenizer\.model: damaged between bytes 0 and"):
        load_model(str(tmp_path / "run"), None)


def test_a_run_that_resumes_checks_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, small())
    seal(path, "vocab.json", "{}")
    load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True)
    (path / "vocab.json").write_text("[]")
    with pytest.raises(DamagedFile, match=r"vocab\.json: damaged"):
        load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True)


def test_an_older_checkpoint_reads_the_files_of_its_run(tmp_path: Path) -> None:
    path = saved_with("GPT2BPETokenizer", tmp_path)
    files = read_manifest(path)
    for name in FILES["GPT2BPETokenizer"]:
        (path / name).unlink()
        files.pop(name)
    write_manifest(path, files)
    with CheckpointReader(path) as reader:
        _, config = trained_tokenizer(reader)
    assert config.vocab_file == str(tmp_path / "files/vocab.json")
    vocab = tmp_path / "files/vocab.json"
    content = json.loads(vocab.read_text())
    vocab.write_text(json.dumps(content | {"zzz": max(content.values()) + 1}))
    with pytest.raises(ValueError, match=r"files of its tokenizer now give .* put back the files"):
        load_model(str(tmp_path / "run"), None)
    vocab.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer files of its own, as it is older: --vocab-file"):
        load_model(str(tmp_path / "run"), None)


def test_iteration_0_can_be_named(tmp_path: Path) -> None:
    words = flags_of("NullTokenizer", tmp_path / "files")
    train_here([*SHAPE, *STEPS, *words, "--save", str(tmp_path / "run")])
    shutil.copytree(tmp_path / "run/iter_0000001", tmp_path / "run/iter_0000000")
    state = tmp_path / "run/iter_0000000" / STATE
    content = json.loads(state.read_text())
    assert state.read_text() == json.dumps(content, indent=1) + "\n"  # people read it
    content["progress"] |= {"iteration": 0, "consumed_samples": 0, "dataset_progress": None}
    seal(state.parent, STATE, json.dumps(content))
    assert load_model(str(tmp_path / "run"), 0)
    argv = [*SHAPE, *STEPS, *words, "--load", str(tmp_path / "run"), "--ckpt-step", "0"]
    assert train_here(argv).iteration == 1
