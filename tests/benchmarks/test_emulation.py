"""The emulator of benchmarks/convergence.py against real ranks, bit for bit."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.corpus.make_tokens import train_bpe
from benchmarks.emulation.emulated_run import AdamWSettings, EmulatedRanks, RunSettings, train
from benchmarks.emulation.flat_model import FlatModel
from benchmarks.emulation.islands import Islands, IslandSettings
from benchmarks.emulation.muon import SCALE, MuonSettings, orthogonalised
from benchmarks.emulation.rungs import LADDERS, RUNGS, Rung
from benchmarks.emulation.source import CHUNK, Source
from benchmarks.emulation.text import Text, coarser
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.zero import difference_formats
from megatron_zpp.zero.gradients import SIGNS_SEED
from tests.checkpoint.saving import digest
from tests.support import nightly
from tests.zero.engines import engine_of, operations, this_device, weights_of
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
    return {name: digest(tensor.cpu()) for name, tensor in weights.items()}


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
    adamw, grid = AdamWSettings(clip_grad=clip), {"nodes": nodes, "ranks_per_node": ranks // nodes}
    state = emulated_ranks(flat, RUNGS[name], **grid, adamw=adamw, seed=SIGNS_SEED)
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
    adamw: AdamWSettings | None = None,
    seed: int = SEED,
    muon: MuonSettings | None = None,
) -> EmulatedRanks:
    return EmulatedRanks(
        flat,
        rung,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        operations=load_operations(flat.master.device.type, require_kernels=False, say=print),
        adamw=adamw or AdamWSettings(),
        seed=seed,
        muon=muon,
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


def muon_step(started: Topology, nodes: int) -> dict[str, list]:
    """The weights after a step with 4-bit codes of gradients and of their sums."""
    optimizer = OptimizerConfig(
        optimizer="muon",
        weight_decay=0.1,
        muon_momentum=0.95,
        muon_nesterov=True,
        muon_extra_scale_factor=SCALE,
    )
    local = started.world_size // nodes
    engine = engine_of(
        MODEL,
        VOCAB,
        zero=ZeroConfig(**ALL_ON, **SETTINGS[EVERYWHERE]),
        optimizer=optimizer,
        precision=PrecisionConfig(fp32=True),
        topology=Topology(started.rank, started.world_size, started.rank % local, local),
        operations=operations(),
        kernel=ATTENTION,
        seed=SEED,
        matrices=trained_matrices(MODEL, optimizer),
    )
    engine.accumulate(batches(0, started.world_size)[started.rank])
    engine.step(1e-2)
    weights = {name: weight.tolist() for name, weight in weights_of(engine).items()}
    engine.close()
    return weights


@pytest.mark.parametrize("nodes", [2, 4])
def test_muon_with_codes_of_sums_takes_the_step_of_real_ranks(nodes: int) -> None:
    """But for the order of sums. Of matrices; in the engine norms and biases beside them travel likewise."""
    rung = RUNGS["sums4 feedback"]
    flat, plain = small_flat(rung), small_flat(RUNGS["baseline"])
    grid = {"nodes": nodes, "ranks_per_node": 4 // nodes}
    for each, of in ((flat, rung), (plain, RUNGS["baseline"])):
        state = emulated_ranks(each, of, **grid, seed=SIGNS_SEED, muon=MuonSettings())
        state.accumulate(batches(0, 4))
        state.step(1e-2, iteration=0)
    (real, *_), first = on_ranks(4, muon_step, nodes), small_flat(rung)
    begun, exact = first.by_name(first.master), plain.by_name(plain.master)
    for name, weight in flat.by_name(flat.master).items():
        if weight.dim() == 2 and name.startswith("layers."):
            moved = (weight - begun[name]).norm()
            assert (torch.tensor(real[name]) - weight).norm() < 1e-5 * moved, name
            assert (exact[name] - weight).norm() > 1e-2 * moved, name


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
    state = emulated_ranks(flat, RUNGS[name], muon=MuonSettings() if name in LADDERS["muon"] else None)
    for step in range(3):
        for _ in range(2):
            loss = state.accumulate(batches(step, 4))
        state.step(1e-2, iteration=step, micro_batches=2)
    assert loss < 4.7  # the logarithm of the vocabulary is 4.62
    assert state.skipped == 0
    for buffer in (flat.master, flat.compute, *state._moments):
        assert buffer.isfinite().all()
        assert not buffer[flat.gaps].any()


@pytest.mark.parametrize("rung", ["delta2 rotated2", "today", "rotated2 feedback", "sums4 feedback"])
def test_a_step_that_is_not_finite_changes_nothing(rung: str) -> None:
    flat = small_flat(RUNGS[rung])
    state = emulated_ranks(flat, RUNGS[rung], muon=MuonSettings(beta2=0.9) if "sums" in rung else None)
    state.accumulate(batches(0, 4))
    state.step(1e-2, iteration=0)
    before = flat.master.clone(), flat.compute.clone()
    state.accumulate(batches(1, 4))
    state._node_sums[1].total[5] = float("nan")
    state.step(1e-2, iteration=1)
    assert state.skipped == 1
    assert torch.equal(flat.master, before[0])
    assert torch.equal(flat.compute, before[1])


def test_matrices_inside_layers_are_muons_and_all_else_has_adamws_own_rate() -> None:
    """Queries, keys and values apart. A first update is the gradient made orthogonal."""
    flat, plain = small_flat(RUNGS["baseline"]), small_flat(RUNGS["baseline"])
    settings = MuonSettings(scalar_lr=0.5, weight_decay=0.0)
    adamw_settings = AdamWSettings(clip_grad=0.0)
    state = emulated_ranks(flat, RUNGS["baseline"], adamw=adamw_settings, muon=settings)
    other = emulated_ranks(plain, RUNGS["baseline"], adamw=adamw_settings)
    before = {name: weights.clone() for name, weights in flat.by_name(flat.master).items()}
    for ranks, rate in ((other, 5e-3), (state, 1e-2)):
        ranks.accumulate(batches(0, 4))
        gradients = flat.by_name(sum(node.total for node in ranks._node_sums))
        ranks.step(rate, iteration=0)
    adamw = plain.by_name(plain.master)
    for name, after in flat.by_name(flat.master).items():
        if after.dim() < 2 or not name.startswith("layers."):
            assert torch.equal(after, adamw[name]), name
            continue
        parts = 3 if name.endswith(".qkv.weight") else 1
        for gradient, update in zip(
            gradients[name].chunk(parts), (before[name] - after).chunk(parts), strict=True
        ):
            made = orthogonalised(gradient[None], settings, torch.float32)[0]
            expected = 1e-2 * SCALE * max(update.shape) ** 0.5 * made
            torch.testing.assert_close(update, expected, rtol=1e-3, atol=1e-5)


def test_feedback_of_the_momentum_leaves_the_last_loss_alone() -> None:
    """What nodes and owners have kept back, times the share of a gradient, is all that the momentum lacks."""
    rung, settings = RUNGS["sums4 feedback of the momentum"], MuonSettings()
    flat = small_flat(rung)
    state = emulated_ranks(flat, rung, muon=settings)
    matrices = slice(0, flat.kinds["tables"].start)
    ((here, cross_node),) = [pair for pair in state._sums if pair[0].start == 0]
    assert here == matrices
    true, arrived = torch.zeros(here.stop), torch.zeros(here.stop)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        nodes = [torch.randn(here.stop, generator=generator) for _ in range(2)]
        nodes = [node.masked_fill(flat.gaps[here], 0.0) for node in nodes]
        true.lerp_(nodes[0] + nodes[1], 0.05)
        arrived.lerp_(cross_node(nodes, step), 0.05)
    of_nodes, of_owners = cross_node.args
    kept = sum(of_nodes._lost) + of_owners._lost[0]
    assert (true - arrived - 0.05 * kept).norm() < 0.02 * (true - arrived).norm()
    assert (true - arrived).norm() < 0.1 * true.norm()


def one_job(adamw: AdamWSettings, flat: FlatModel, ranks: int) -> EmulatedRanks:
    return emulated_ranks(flat, RUNGS["baseline"], nodes=1, ranks_per_node=ranks, adamw=adamw)


def islands_of(settings: IslandSettings, steps: int, adamw: AdamWSettings) -> Islands:
    """Of four ranks, with the weights of `small_flat`."""
    flat = small_flat(RUNGS["baseline"])
    return Islands(flat, partial(one_job, adamw), settings, operations(), ranks=4, steps=steps, seed=SEED)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_islands_that_average_after_each_step_of_sgd_are_one_job(count: int) -> None:
    """H = 1, an outer rate of 1, no momentum, fp32: the weights of synchronous training within 1e-6."""
    # Beside such an epsilon AdamW without decay is SGD, with a rate of lr / eps.
    sgd = AdamWSettings(weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e8, clip_grad=0.0)
    islands = islands_of(IslandSettings(count=count, interval=1, lr=1.0, momentum=0.0), 3, sgd)
    one = one_job(sgd, small_flat(RUNGS["baseline"]), 4)
    before = one.flat.master.clone()
    for step in range(3):
        for state in (one, islands):
            state.accumulate(torch.stack(batches(step, 4)))
            state.step(1e7, iteration=step)
    islands.evaluate(batches(9, 1)[0], 2)
    assert (one.flat.master - before).abs().max() > 1e-3
    torch.testing.assert_close(islands.flat.master, one.flat.master, rtol=0, atol=1e-6)


def moving(settings: IslandSettings, steps: int) -> tuple[Islands, torch.Tensor]:
    """Two islands, and what each moves by in each step (steps, 2, n) in place of what it would learn."""
    islands = islands_of(settings, steps, AdamWSettings())
    for island in islands._islands:
        island.step = lambda *_, **__: None  # type: ignore[method-assign,assign]
    drawn = torch.randn(steps, 2, islands.flat.numel, generator=torch.Generator().manual_seed(5))
    return islands, drawn * ~islands.flat.gaps


def move(islands: Islands, moves: torch.Tensor, steps: range) -> None:
    for step in steps:
        for island, by in zip(islands._islands, moves[step], strict=True):
            island.flat.master += by
        islands.step(0.0, iteration=step)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_the_outer_optimizer_is_torchs_nesterov(overlap: float) -> None:
    """Weights that move on while an exchange is under way keep what they moved by; the last is awaited."""
    settings = IslandSettings(interval=4, lr=0.7, momentum=0.9, overlap=overlap)
    islands, moves = moving(settings, 10)
    outer = torch.nn.Parameter(islands.flat.master.clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    expected = outer.detach().repeat(2, 1)
    late, at = round(4 * overlap), 0
    for step, leaves in ((4, True), (4 + late, False), (8, True), (min(8 + late, 10), False), (10, True)):
        move(islands, moves, range(at, step))
        expected += moves[at:step].sum(0)
        at = step
        if leaves:
            left = expected.clone()
            outer.grad = outer.detach() - left.mean(0)
            optimizer.step()
        if not leaves or (leaves and step == 10):
            expected += outer.detach() - left
    found = torch.stack([island.flat.master for island in islands._islands])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], outer.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "lost"), [(4, 0.15), (2, 0.6)])
def test_what_codes_of_an_exchange_lose_is_in_the_next(bits: Any, lost: float) -> None:
    """So the outer weights lack what the last one lost, and no more."""
    settings = IslandSettings(interval=1, lr=1.0, momentum=0.0, bits=bits)
    islands, moves = moving(settings, 5)
    exact = islands.flat.master + moves.mean(1).sum(0)
    move(islands, moves, range(5))
    lacks = islands._outer - exact
    errors = torch.stack([lost.float() for lost in islands._exchange._lost]).mean(0)  # type: ignore
    torch.testing.assert_close(lacks, errors, rtol=0.01, atol=0.02)
    assert 0 < lacks.norm() < lost * moves[0].mean(0).norm()
    assert not islands._outer[islands.flat.gaps].any()


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
    n, everything = 1 << 20, {"mlp": 8, "tables": 3, "small": 1}
    four = LloydMaxFormat(4, 256).message_bytes(n) / n
    for name in LADDERS["muon"][1:]:
        assert RUNGS[name].bytes_per_parameter(everything) == pytest.approx(2 * four)
    with pytest.raises(ValueError, match=r"weights must be one of .*, got delta5"):
        Rung(weights="delta5")
    with pytest.raises(ValueError, match="sums rotated4 need weights none, got plain"):
        Rung(sums="rotated4")


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
    again = text.training(2, 50)  # there are 110 samples
    assert len({row[0] for row in again.tolist()}) == 50
    assert not torch.equal(again, first)
    more = [row[0] for row in text.training(0, 150).tolist()]
    assert len(set(more[:110])) == 110  # the first epoch
    assert len(set(more[110:])) == 40
    with pytest.raises(SystemExit, match="221 samples of 9 tokens: there are 2 × 110"):
        text.training(0, 221)
    assert not any(start < 600 < start + 9 for start in begun)  # a sample has tokens of one file


def test_a_coarser_vocabulary_is_that_of_fewer_merges(tmp_path: Path) -> None:
    """Its tokens are those of byte-level BPE with the first merges alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = Path(__file__).read_text()
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    fine = tmp_path / "tokens"
    fine.mkdir()
    train_bpe(tmp_path / "text.jsonl", 600, 1 << 20, fine)
    vocabulary = json.loads((fine / "vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (fine / "merges.txt").read_text().splitlines()[1:]]

    def encoded(entries: int) -> list[int]:
        words = {word: token for word, token in vocabulary.items() if token < entries - 1}
        model = Tokenizer(models.BPE(words, [pair for pair in merges if "".join(pair) in words]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return [*model.encode(text).ids, entries - 1]

    for name in ("training-00", "held_out-a"):
        with IndexedDatasetWriter(fine / f"{name}_text_document", np.dtype(np.uint16)) as writer:
            writer.add_document(encoded(600))
    found = coarser(fine, 320)
    assert IndexedDataset(found / "training-00_text_document").tokens[:].tolist() == encoded(320)
    assert Text.described(found)["vocabulary"] == 320
    assert coarser(fine, 320) == found
