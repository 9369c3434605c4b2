"""The plan's line on --buddy-snapshots, against arithmetic on the parameters of the model."""

import re

import pytest

from megatron_zpp.plan.memory_snapshots import node_bytes, pinned_bytes
from tests.plan.jobs import printed
from tests.support import nightly

MODEL = (
    "--dry-run --model-preset 1.3b --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --lr 1e-4 "
    "--micro-batch-size 1 --train-iters 9 --zero-stage 3 --plan-gpus-per-node 8 --save new --load new"
).split()


@pytest.mark.parametrize(("nodes", "copies"), [nightly(1, 2), (4, 4)])
def test_a_node_holds_twelve_bytes_per_parameter_of_each_copy(nodes: int, copies: int) -> None:
    """fp32 weights and two moments of all nodes together; twice, and on several nodes the buddy's as well."""
    said = printed(*MODEL, "--plan-nodes", str(nodes), "--buddy-snapshots", "10")
    (line,) = [line for line in said.splitlines() if "--buddy-snapshots" in line]
    found = re.fullmatch(r" +([\d.]+) GiB of tmpfs on each node .*, and ([\d.]+) GiB of CPU memory .*", line)
    assert found is not None
    parameters = re.search(r"GPT of ([\d,.]+) M parameters", said)
    assert parameters is not None
    states = 12e6 * float(parameters[1].replace(",", "")) / 2**30
    # Padding of units to whole blocks on all ranks: below 1% of such a model.
    assert copies * states / nodes <= float(found[1]) + 0.01 < 1.01 * copies * states / nodes + 0.02
    # The layers' shards of 32 GPUs, 6.0 MiB, become 8 each when they are pinned; those of 8 become 32 of 24.
    assert float(found[2]) * copies == pytest.approx(4 / 3 * float(found[1]), rel=0.03)
    assert "tmpfs" not in printed(*MODEL, "--plan-nodes", str(nodes))


def test_bytes_of_a_node() -> None:
    assert node_bytes(100, 1, 8) == 1600
    assert node_bytes(100, 2, 8) == 3200


def test_pinned_copies_are_powers_of_two() -> None:
    assert pinned_bytes([]) == pinned_bytes([0]) == 0
    assert pinned_bytes([1, 3, 4, 5, 4096, 4097]) == 1 + 4 + 4 + 8 + 4096 + 8192


@pytest.mark.nightly
def test_an_asynchronous_save_has_copies_of_its_own() -> None:
    plain, saving = (printed(*MODEL, "--plan-nodes", "4", *more) for more in ([], ["--async-save"]))
    assert "CPU memory" not in plain
    (line,) = [line for line in saving.splitlines() if "--async-save" in line]
    both = printed(*MODEL, "--plan-nodes", "4", "--async-save", "--buddy-snapshots", "10")
    assert line in both
    gibibytes = re.match(r"  ([\d.]+) GiB of CPU memory of the ranks of each node for --async-save$", line)
    assert gibibytes is not None
    assert f"{gibibytes[1]} GiB of CPU memory of its ranks" in both
    for more, share in (["--no-save-optim"], 1 / 3), (["--zero-offload-optimizer"], 3 / 4):  # 6 of 8 MiB
        output = printed(*MODEL, "--plan-nodes", "4", "--async-save", *more)
        found = re.search(r"([\d.]+) GiB of CPU memory of the ranks of each node for --async-save", output)
        assert found is not None
        assert float(found[1]) == pytest.approx(share * float(gibibytes[1]), rel=0.03)
