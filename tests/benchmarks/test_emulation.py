"""The emulator of benchmarks/convergence.py --emulate against real ranks, bit for bit."""

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.emulation.emulated_run import AdamWSettings, EmulatedRanks, RunSettings, train
from benchmarks.emulation.flat_model import FlatModel
from benchmarks.emulation.rungs import RUNGS, Rung
from benchmarks.emulation.source import CHUNK, Source
from benchmarks.emulation.text import Text
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.reference_difference import add_difference, quantize_difference
from megatron_zpp.ops.reference_rotation import quantize_rotated, sum_rotated
from megatron_zpp.zero import difference_formats
from megatron_zpp.zero.build import in_order, layouts_of
from megatron_zpp.zero.gradients import SIGNS_SEED
from tests.support import nightly
from tests.zero.engines import engine_of, weights_of
from tests.zero.quantizing import operations, this_device
from tests.zero.ranks import on_ranks

VOCAB, SEED = 101, 3
CPU, ATTENTION = torch.device("cpu"), DotProduct("math")  # which repeats its sums on GPUs too
MODEL = ModelConfig(  # nothing divides: not by ranks, not by blocks
    num_layers=3, hidden_size=36, num_attention_heads=3, seq_length=10, hidden_dropout=0, attention_dropout=0
)
ALL_ON = {
    "zero_stage": 3,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": "auto",
}
EVERYWHERE = "four bits everywhere behind int8"
SETTINGS: dict[str, dict[str, Any]] = {
    "today": {},
    EVERYWHERE: {"zero_quantized_weights_format": "delta4", "zero_quantized_gradients_format": "rotated4"},
}
RATES = (1e-2, 3e-2, 1e-2, 5e-3)
Case = tuple[str, bool, float, int]  # rung, bf16, clipping, nodes
CASES: list[Case] = [
    (name, bf16, clip, nodes)
    for name, clip in (("today", 1.0), ("baseline", 0.0))
    for bf16 in (False, True)
    for nodes in (1, 2, 4)
    # Plain bf16 gradients cross 2 × 2 in one hop, in the order of the ranks: other sums than two hops give.
    if name == "today" or not bf16 or nodes != 2
]
CASES += [(EVERYWHERE, bf16, 1.0, nodes) for bf16 in (False, True) for nodes in (2, 4)]


def batches(step: int, ranks: int, index: int = 0) -> list[torch.Tensor]:
    """Tokens of each rank for micro-batch `index` of a step."""
    generator = torch.Generator().manual_seed(step + len(RATES) * index)
    return list(torch.randint(VOCAB, (ranks, 2, 11), generator=generator))


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
    }


def with_engine(
    started: Topology,
    cases: list[Case],
    lost_share: float = difference_formats.LOST_SHARE,
    micro_batches: int = 1,
) -> list[dict[str, str]]:
    """Digests of the final weights of each case, on real ranks.

    Several micro-batches are summed inside nodes, and cross between them once per step.
    """
    torch.set_num_threads(1)
    difference_formats.LOST_SHARE = lost_share
    rank, world = started.rank, started.world_size
    results = []
    for name, bf16, clip, nodes in cases:
        topology = Topology(rank, world, rank % (world // nodes), world // nodes)
        zero = ALL_ON | SETTINGS[name] if name in SETTINGS else {"zero_stage": 3}
        if micro_batches > 1:
            zero = zero | {"zero_gradient_partition_size": "auto"}
        engine = engine_of(
            MODEL,
            VOCAB,
            zero=ZeroConfig(**zero),
            optimizer=OptimizerConfig(weight_decay=0.1, adam_beta2=0.95, clip_grad=clip),
            precision=PrecisionConfig(bf16=bf16, fp32=not bf16),  # without either a GPU computes in bf16
            topology=topology,
            device=str(this_device()),
            operations=operations(),
            kernel=ATTENTION,
            seed=SEED,
        )
        engine.spare.close()  # products on fewer multiprocessors of a GPU may add up in another order
        for step, learning_rate in enumerate(RATES):
            for index in range(micro_batches):
                tokens = batches(step, world, index)[rank]
                engine.accumulate(tokens, index=index, micro_batches=micro_batches)
            engine.step(learning_rate)
        results.append(digests(weights_of(engine)))
        engine.close()
    return results


def emulated(case: Case, ranks: int, micro_batches: int = 1, device: torch.device = CPU) -> dict[str, str]:
    return digests_of(emulated_state(case, ranks, micro_batches, device))


def digests_of(state: EmulatedRanks) -> dict[str, str]:
    return digests(state.flat.by_name(state.flat.master))


def emulated_state(
    case: Case, ranks: int, micro_batches: int = 1, device: torch.device = CPU
) -> EmulatedRanks:
    name, bf16, clip, nodes = case
    flat = small_flat(RUNGS[name], torch.bfloat16 if bf16 else torch.float32, device)
    state = emulated_ranks(
        flat, RUNGS[name], nodes=nodes, ranks_per_node=ranks // nodes, clip_grad=clip, seed=SIGNS_SEED
    )
    for step, learning_rate in enumerate(RATES):
        for index in range(micro_batches):
            state.accumulate([tokens.to(device) for tokens in batches(step, ranks, index)])
        state.step(learning_rate, iteration=step, micro_batches=micro_batches)
    assert not flat.master[flat.gaps].any()
    return state


def emulated_ranks(
    flat: FlatModel,
    rung: Rung,
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    clip_grad: float = 1.0,
    seed: int = SEED,
) -> EmulatedRanks:
    return EmulatedRanks(
        flat,
        rung,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        operations=load_operations(flat.master.device.type, require_kernels=False, say=print),
        adamw=AdamWSettings(clip_grad=clip_grad),
        seed=seed,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("micro_batches", "cases"),
    [
        (1, CASES),
        nightly(3, [(name, bf16, 1.0, n) for name, bf16, n in product(SETTINGS, (False, True), (2, 4))]),
    ],
)
def test_final_weights_are_those_of_real_ranks(micro_batches: int, cases: list[Case]) -> None:
    """All-on ZeRO++ as it is today, and plain stage 3, on 1 × 4, 2 × 2 and 4 × 1, in fp32 and bf16."""
    first, *others = on_ranks(4, with_engine, cases, difference_formats.LOST_SHARE, micro_batches)
    assert all(other == first for other in others)
    pairs = zip(cases, first, strict=True)
    assert not [case for case, real in pairs if emulated(case, 4, micro_batches) != real]


def test_raised_units_are_those_of_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that some units exceed: codes of 4 bits miss 0.0095 of a normal distribution."""
    case: Case = (EVERYWHERE, True, 1.0, 2)
    first, *others = on_ranks(4, with_engine, [case], 0.016)
    assert all(other == first for other in others)
    monkeypatch.setattr(difference_formats, "LOST_SHARE", 0.016)
    state = emulated_state(case, 4)
    assert 0 < state.raised < 2 * state.flat.units  # in the last two of four steps
    assert digests_of(state) == first[0]


def small_flat(rung: Rung, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> FlatModel:
    return FlatModel(
        MODEL, VOCAB, alignment=rung.largest_block, dtype=dtype, device=device, seed=SEED, attention=ATTENTION
    )


@pytest.mark.parametrize("name", list(RUNGS))
def test_every_rung_trains_and_keeps_gaps_zero(name: str) -> None:
    flat = small_flat(RUNGS[name])
    state = emulated_ranks(flat, RUNGS[name])
    for step in range(3):
        for _ in range(2):
            loss = state.accumulate(batches(step, 4))
        state.step(1e-2, iteration=step, micro_batches=2)
    assert loss < 4.7  # the logarithm of the vocabulary is 4.62
    assert state.skipped == 0
    for buffer in (flat.master, flat.compute, *state._moments):
        assert buffer.isfinite().all()
        assert not buffer[flat.gaps].any()


@pytest.mark.parametrize("rung", ["delta4 rotated2", "today", "rotated2 feedback"])
def test_a_step_that_is_not_finite_changes_nothing(rung: str) -> None:
    flat = small_flat(RUNGS[rung])
    state = emulated_ranks(flat, RUNGS[rung])
    state.accumulate(batches(0, 4))
    state.step(1e-2, iteration=0)
    before = flat.master.clone(), flat.compute.clone()
    state.accumulate(batches(1, 4))
    state._node_sums[1].total[5] = float("nan")
    state.step(1e-2, iteration=1)
    assert state.skipped == 1
    assert torch.equal(flat.master, before[0])
    assert torch.equal(flat.compute, before[1])


def test_differences_are_those_of_the_oracle() -> None:
    """The emulator's reference moves as by messages, and compute gets the reference in its own format."""
    rung = RUNGS["delta2"]
    flat = small_flat(rung, torch.bfloat16)
    state = emulated_ranks(flat, rung)
    here = slice(flat.kinds["attention"].start, flat.kinds["mlp"].stop)
    reference = flat.master[here].bfloat16().float()
    assert torch.equal(flat.compute[here], reference.bfloat16())
    for step in range(2):
        state.accumulate(batches(step, 4))
        state.step(1e-2, iteration=step)
        message = torch.empty(LloydMaxFormat(2, 256).message_bytes(len(reference)), dtype=torch.uint8)
        quantize_difference(flat.master[here], reference, message, 2, 256)
        add_difference(message[None], reference, 2, 256)
        reference[flat.gaps[here]] = 0
        assert torch.equal(flat.compute[here], reference.bfloat16())


def test_rotated_codes_are_those_of_the_oracle_in_the_engines_layout() -> None:
    """Signs belong to (unit, element of its flat buffer), whatever the order of parameters here."""
    rung = RUNGS["rotated4 tables4"]
    flat = small_flat(rung)
    state = emulated_ranks(flat, rung)
    nodes = [torch.randn(flat.numel, generator=torch.Generator().manual_seed(node)) for node in range(2)]
    for node in nodes:
        node[flat.gaps] = 0
    coded = slice(0, flat.kinds["tables"].stop)
    ((here, cross_node),) = [pair for pair in state._sums if pair[0] == coded]
    arrived = torch.zeros(flat.numel)
    arrived[here] = cross_node.sum([node[here] for node in nodes], 7)
    by_name, sent = flat.by_name(arrived), [flat.by_name(node) for node in nodes]
    units = flat.model.units()
    for index, ((unit, module), layout) in enumerate(zip(units, layouts_of(units, Mesh(), 256), strict=True)):
        names = [f"{unit}.{path}" for path, parameter in in_order(module) if parameter.dim() > 1]
        if not names:
            continue
        n = (*layout.offsets, layout.numel)[len(names)]
        messages = torch.empty(2, LloydMaxFormat(4, 256).message_bytes(n), dtype=torch.uint8)
        for node, message in zip(sent, messages, strict=True):
            whole = torch.zeros(n)
            for name, offset in zip(names, layout.offsets, strict=False):
                whole[offset : offset + node[name].numel()] = node[name].flatten()
            quantize_rotated(whole, message[None], 4, 256, SEED, index, 7)
        total = torch.empty(n)
        sum_rotated(messages, total, 4, 256, SEED, index, 7)
        for name, offset in zip(names, layout.offsets, strict=False):
            expected = total[offset : offset + by_name[name].numel()]
            assert torch.equal(by_name[name].flatten(), expected), name


@pytest.mark.parametrize("name", ["delta2 rotated2", EVERYWHERE])
def test_the_codes_in_plain_torch_are_those_of_the_engines_operations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rungs with what the engine lacks differ from it in nothing else."""
    found = []
    for varies in (False, True):
        monkeypatch.setattr(Rung, "varies_rotation", varies)
        flat = small_flat(RUNGS[name])
        state = emulated_ranks(flat, RUNGS[name])
        for step in range(3):
            state.accumulate(batches(step, 4))
            state.step(1e-2, iteration=step)
        found.append(digests(flat.by_name(flat.master)))
    assert found[0] == found[1]


def run_of(rung: str, seed: int = 0) -> dict[str, Any]:
    settings = RunSettings(
        size="tiny", steps=6, micro_batch_size=1, precision="fp32", attention="auto", eval_samples=8
    )
    return train(settings, RUNGS[rung], seed, device=CPU, operations=operations())


def test_equal_runs_end_with_equal_bits() -> None:
    first, again, other = (run_of("delta2 rotated2", seed) for seed in (0, 0, 1))
    assert first["sha256"] == again["sha256"] != other["sha256"]
    assert first["loss"] == again["loss"]
    assert [step for step, lag in first["reference_lag"] if 0.05 < lag < 2] == [2, 3, 4, 5, 6]
    assert first["bytes_per_parameter_in_layers"] == 0.5156


def test_a_nudged_run_begins_with_one_other_weight() -> None:
    """It shows what the least difference does to a loss; in float32, hardly anything in six steps."""
    plain, nudged = map(run_of, ("baseline", "baseline, nudged"))
    assert plain["sha256"] != nudged["sha256"]
    assert nudged["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_the_language_is_drawn_anywhere_alike() -> None:
    source = Source(64, 20)
    whole = source.sequences(5, 0, CHUNK + 40)
    assert whole.shape == (CHUNK + 40, 20)
    assert (whole.min(), whole.max() < 64) == (0, True)
    assert torch.equal(Source(64, 20).sequences(5, CHUNK - 3, 10), whole[CHUNK - 3 : CHUNK + 7])
    assert not torch.equal(source.sequences(6, 0, 40), whole[:40])
    assert len({tuple(row) for row in whole.tolist()}) == len(whole)  # no sample twice


def test_bytes_of_rungs() -> None:
    layers = {"mlp": 1}
    today = {"attention": 4, "mlp": 8, "tables": 1, "small": 0}
    assert RUNGS["today"].bytes_per_parameter(today) == pytest.approx(1 + 2 / 256 + 0.5 + 2 / 128)
    assert RUNGS["delta4 rotated4"].bytes_per_parameter(layers) == 1.015625
    assert RUNGS["delta2 rotated2"].bytes_per_parameter(layers) == 0.515625
    assert RUNGS["baseline"].bytes_per_parameter(layers) == 6
    with pytest.raises(ValueError, match=r"weights must be one of .*, got delta5"):
        Rung(weights="delta5")


def test_runs_on_text_share_no_sample(tmp_path: Path) -> None:
    """Each sample is a run of one file's tokens; those of a run, and of neighbouring seeds, differ."""
    tokens = np.arange(1000, dtype=np.uint16)
    for name, values in (
        ("training-00", tokens[:600]),
        ("training-01", tokens[600:]),
        ("held_out-a", tokens),
    ):
        with IndexedDatasetWriter(tmp_path / f"{name}_text_document", np.dtype(np.uint16)) as writer:
            writer.add_document(values)
    (tmp_path / "vocab.json").write_text(json.dumps({str(token): token for token in range(1000)}))
    assert (Text.described(tmp_path)["tokens"], Text.described(tmp_path)["vocabulary"]) == (1000, 1000)
    text = Text(tmp_path, 9)
    first, second = text.training(0, 50), text.training(1, 50)
    assert torch.equal(first, Text(tmp_path, 9).training(0, 50))
    for row in torch.cat([first, second, text.held_out(40)]).tolist():
        assert row == list(range(row[0], row[0] + 9))
    begun = {row[0] for row in torch.cat([first, second]).tolist()}
    assert len(begun) == 100
    assert not any(start < 600 < start + 9 for start in begun)  # a sample has tokens of one file
