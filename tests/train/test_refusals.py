"""What a whole run refuses: one line with flag, value and fix; no traceback; nothing written."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.indexed import IndexedDatasetWriter
from megatron_zpp.data.provenance import write_provenance
from tests.support import ROOT, environment, pretrain

LENGTH = ["--train-iters", "2"]


def refused(*argv: str, status: int = 1, words: list[str], **extra: object) -> None:
    done = pretrain(*argv, *LENGTH, **extra)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def swapped(flags: list[str], flag: str, value: str) -> list[str]:
    position = flags.index(flag)
    return [*flags[: position + 1], value, *flags[position + 2 :]]


def test_a_bad_command_line_is_status_2(flags: list[str]) -> None:
    refused(*flags, "--num-layer", "3", status=2, words=["--num-layer 3", "did you mean --num-layers?"])


def test_a_missing_data_set(flags: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    refused(*swapped(flags, "--data-path", missing), words=[missing])


def test_a_truncated_data_set(flags: list[str], truncated: str) -> None:
    refused(*swapped(flags, "--data-path", truncated), words=[truncated + ".bin", "byte"])


def test_a_foreign_index(flags: list[str], truncated: str) -> None:
    Path(truncated + ".idx").write_bytes(b"TNTIDX\x00\x00" + bytes(64))
    refused(*swapped(flags, "--data-path", truncated), words=[truncated + ".idx", "byte"])


def test_a_token_outside_the_vocabulary(flags: list[str]) -> None:
    refused(*swapped(flags, "--vocab-size", "90"), words=["vocabulary", "91"])


def test_a_tokenizer_that_did_not_make_the_data(flags: list[str], tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(50):
            writer.add_document(np.arange(100, dtype=np.uint16))
    other = {"tokenizer_type": "NullTokenizer", "vocab_size": 301, "eod": 300, "fingerprint": "0" * 64}
    write_provenance(prefix, other)
    refused(*swapped(flags, "--data-path", prefix), words=["--tokenizer-type", "301", "257"])


def test_a_data_set_smaller_than_a_sample(flags: list[str]) -> None:
    refused(*flags, "--seq-length", "100000", words=["--seq-length 100000", "100001 tokens"])


def test_a_data_set_smaller_than_a_batch(flags: list[str]) -> None:
    refused(*flags, "--global-batch-size", "8000", words=["--global-batch-size 8000", "samples"])


def test_sizes_that_do_not_divide(flags: list[str]) -> None:
    refused(
        *flags, "--global-batch-size", "6", words=["--global-batch-size 6", "--micro-batch-size 4", "4 or 8"]
    )


def test_a_directory_that_cannot_be_written(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save = str(tmp_path / "file" / "below")
    refused(*flags, "--save", save, words=["--save", save, "Not a directory"])


@pytest.mark.parametrize("flag", ["--metrics-file", "--tensorboard-dir"])
def test_a_log_that_cannot_be_written(flags: list[str], tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below" / "log")
    refused(*flags, flag, place, words=[flag, str(tmp_path / "file" / "below")])


def test_nothing_to_load(flags: list[str], tmp_path: Path) -> None:
    empty = str(tmp_path)
    refused(*flags, "--load", empty, words=["--load", empty, "--save"])
    both = [*flags, "--load", empty, "--save", empty]
    refused(*both, "--exit-on-missing-checkpoint", words=["--load", empty, "--exit-on-missing-checkpoint"])


def test_a_checkpoint_of_another_model(flags: list[str], tmp_path: Path) -> None:
    save = str(tmp_path / "checkpoints")
    assert pretrain(*flags, "--train-iters", "1", "--save", save).returncode == 0
    refused(*flags, "--load", save, "--hidden-size", "32", words=["shape", "iter_0000001"])
    refused(*flags, "--load", save, "--num-layers", "3", words=["layers.2", "iter_0000001"])
    refused(*swapped(flags, "--vocab-size", "300"), "--load", save, words=["301", "257", "tokenizer"])


def test_a_gpu_that_is_not_there(flags: list[str]) -> None:
    refused(*flags, "--device", "cuda", words=["--device cuda", "--device cpu"], CUDA_VISIBLE_DEVICES="")


def test_apex_that_is_not_there(flags: list[str]) -> None:
    refused(*flags, "--fused-backend", "apex", words=["--fused-backend apex", "torch"])


def test_offload_from_the_cpu(flags: list[str]) -> None:
    refused(*flags, "--zero-offload-optimizer", words=["--zero-offload-optimizer", "already"])


def test_activations_cannot_be_offloaded_from_the_cpu(flags: list[str]) -> None:
    refused(
        *(*flags, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-offload"),
        words=["--recompute-offload", "needs GPUs", "cpu"],
    )


def test_half_a_launcher(flags: list[str]) -> None:
    refused(*flags, words=["RANK", "WORLD_SIZE"], WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")


def test_each_node_says_it_once(flags: list[str]) -> None:
    """Ranks with another local rank stay silent about what all of them see."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    bad = [*flags, *LENGTH, "--num-layer", "3"]
    assert pretrain(*bad, RANK="0", LOCAL_RANK="0", **place).stderr.count("\n") == 1
    other = pretrain(*bad, RANK="1", LOCAL_RANK="1", **place)
    assert (other.returncode, other.stderr) == (2, "")


def test_ranks_started_with_other_flags(flags: list[str]) -> None:
    """Each rank says which field differs, instead of training something else or hanging."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *flags, *LENGTH, "--clip-grad", clip],
            cwd=ROOT,
            env=environment(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, clip in (("0", "1.0"), ("1", "2.0"))
    ]
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 1
        assert out == ""
        assert "optimizer.clip_grad differs between ranks: rank 1 and rank 0" in err
        assert f"rank {number}: {number + 1}.0" in err
