"""Tables in units of some rows (--zero-table-rows): what may not change a bit, and what rounds otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.reads import Reads
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero import zeropp_engines as zeropp
from tests.zero.engines import all_states, engine_of, model_of, needed, same_bits, train, weights_of
from tests.zero.quantizing import operations
from tests.zero.ranks import on_ranks

VOCAB, ROWS, BLOCKS = 102, 37, 4  # of 128 rows
MODEL = model_of(num_attention_heads=4, seq_length=10)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True)
ROPE = replace(MODEL, position_embedding_type="rope", kv_channels=8, embed_layernorm=True)
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)
STAGE_3: dict[str, Any] = {"zero_stage": 3}
HPZ, ALL, DELTA4 = (STAGE_3 | zero for zero in (zeropp.HPZ, zeropp.ALL, zeropp.DELTA4 | zeropp.QGZ))


def build(
    topology: Topology,
    zero: dict[str, Any],
    rows: int | None = ROWS,
    *,
    model: ModelConfig = MODEL,
    recompute: dict[str, Any] | None = None,
    precision: PrecisionConfig = FP32,
    tensor: int = 1,
) -> ZeroEngine:
    settings = ZeroConfig(**zero, zero_table_rows=rows)
    return engine_of(
        model,
        VOCAB,
        zero=settings,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=0.5),
        precision=precision,
        recompute=RecomputeConfig(**(recompute or {})),
        topology=topology,
        operations=operations() if settings.quantizes else None,
        tensor=tensor,
    )


# (ZeRO, other settings, micro-batches)
Case = tuple[dict[str, Any], dict[str, Any], int]
STAGES: list[Case] = [({"zero_stage": stage}, {}, 2) for stage in range(4)]
AGREEING: list[Case] = [*STAGES, *(({"zero_stage": stage}, {"model": UNTIED}, 1) for stage in (1, 3))]
MORE_AGREEING: list[Case] = [
    *(({"zero_stage": stage}, {"model": UNTIED}, 2) for stage in (0, 2)),
    *(({"zero_stage": stage}, {"model": ROPE}, 1) for stage in range(4)),
]
SHARED_BLOCKS: list[Case] = [
    ({"zero_stage": 1}, {"tensor": 2}, 2),
    (HPZ, {"tensor": 2, "model": UNTIED, "recompute": FULL}, 1),
]
IN_GROUPS: list[Case] = [
    (STAGE_3 | {"zero_gradient_partition_size": "auto"}, {"recompute": FULL}, 2),
    (HPZ | {"zero_gradient_partition_size": "auto"}, {"model": UNTIED}, 1),
]


def beside_whole_tables(
    topology: Topology, cases: list[Case]
) -> list[tuple[list[float], list[float], float]]:
    """What training finds with whole tables and with blocks, and how far weights are apart, in steps."""
    found = []
    for zero, settings, micro_batches in cases:
        results, weights = [], []
        for rows in (None, ROWS + 1):
            engine = build(topology, zero, rows, **settings)
            initial = weights_of(engine)
            results.append(train(engine, range(3), micro_batches))
            weights.append((initial, weights_of(engine)))
            engine.close()
        (before, whole), (same, blocks) = weights
        assert same_bits(before, same)
        apart = [
            ((blocks[name] - whole[name]).norm() / (whole[name] - before[name]).norm()) for name in whole
        ]
        found.append((*results, max(apart).item()))
    return found


@pytest.mark.parametrize(
    ("ranks", "local", "cases"),
    [
        nightly(1, 1, [STAGES[0], AGREEING[-1]], id="1"),
        nightly(2, 2, [STAGES[0], STAGES[3], *AGREEING[-2:]], id="2"),
        pytest.param(4, 2, [*IN_GROUPS, *SHARED_BLOCKS], id="2x2"),
        nightly(2, 2, [*STAGES[1:3], *MORE_AGREEING], id="2-more"),
        nightly(4, 2, [*AGREEING, *MORE_AGREEING], id="2x2-more"),
    ],
)
def test_blocks_train_as_whole_tables_do(ranks: int, local: int, cases: list[Case]) -> None:
    """From the same initial weights, with the losses and norms of fp32 sums in another order.

    AdamW's first steps divide gradients by their own size, so small ones turn their rounding into parts of a
    step: 1 in 1,000 of the way that the weights went.
    """
    for found in on_ranks(ranks, beside_whole_tables, cases, ranks_per_node=local):
        for case, (whole, blocks, apart) in zip(cases, found, strict=True):
            assert blocks == pytest.approx(whole, rel=2e-5, abs=1e-5), case
            assert apart < 1e-3, case


# Groups of runs with blocks that have the same bits, on two nodes of two ranks.
SAME: list[list[Case]] = [
    [
        ({"zero_stage": 2}, {}, 2),
        (STAGE_3, {}, 2),
        (STAGE_3, {"recompute": FULL}, 2),
        (STAGE_3 | {"zero_prefetch_units": 0, "zero_unit": "sublayer"}, {}, 2),
        (STAGE_3 | {"zero_prefetch_units": 5}, {"recompute": FULL}, 2),
        (HPZ, {"recompute": FULL | {"recompute_num_layers": 2}}, 2),
    ],
    [(ALL, {"precision": BF16}, 2), (ALL, {"precision": BF16, "recompute": FULL}, 2)],
]


def groups_of(topology: Topology, groups: list[list[Case]]) -> list[list[tuple[list[float], list]]]:
    """What training finds, and the weights."""
    found = []
    for cases in groups:
        of_group = []
        for zero, settings, micro_batches in cases:
            engine = build(topology, zero, **settings)
            losses = train(engine, range(2), micro_batches)
            weights = weights_of(engine)
            of_group.append((losses, [weights[name].flatten().tolist() for name in sorted(weights)]))
            engine.close()
        found.append(of_group)
    return found


@pytest.mark.parametrize(("ranks", "groups"), [(2, [STAGES[:2]]), nightly(4, SAME)])
def test_when_blocks_are_gathered_changes_no_bit(ranks: int, groups: list[list[Case]]) -> None:
    """Stages that reduce alike, recomputation, any number of units ahead, hpZ; with ZeRO++, which rounds."""
    for found in on_ranks(ranks, groups_of, groups, ranks_per_node=2):
        for cases, of_group in zip(groups, found, strict=True):
            for case, result in zip(cases, of_group, strict=True):
                assert result == of_group[0], case


def test_all_of_zeropp_trains_blocks_as_it_trains_whole_tables() -> None:
    """Codes of 4 bits of other blocks: as accurate."""
    cases: list[Case] = [(DELTA4, {"precision": BF16, "recompute": FULL}, 2)]
    for whole, blocks, _ in on_ranks(4, beside_whole_tables, cases, ranks_per_node=2)[0]:
        assert blocks[:-1] == pytest.approx(whole[:-1], rel=0.02)


# Ranks of a run are 2; (stage, rows, tensor ranks) of the run that saves and of the one that loads.
RESUMES = [((3, 37, 1), (1, None, 1)), ((2, None, 1), (3, 50, 1)), ((1, 50, 1), (3, 37, 1))]
SHARED = [((3, 37, 1), (3, None, 2)), ((2, None, 2), (3, 37, 1)), ((3, 38, 2), (1, 37, 1))]
SHARED += [((1, 37, 1), (3, 38, 2))]


def loaded_elsewhere(topology: Topology, directory: str) -> list[tuple[int, bool, bool]]:
    """The format's version, and whether a run, and a program of one process, load what another run saved."""
    found = []
    for number, ((stage, rows, tensor), (other, others, more)) in enumerate([*RESUMES, *SHARED]):
        engine = build(topology, {"zero_stage": stage}, rows, tensor=tensor)
        train(engine, range(2))
        expected, weights = all_states(engine), weights_of(engine)
        path = save(Path(directory) / str(number), engine, Progress(iteration=2))
        engine.close()
        again = build(topology, {"zero_stage": other}, others, tensor=more)
        load_checkpoint(path, again, TOKENIZER, with_optimizer=True)
        same = same_bits(all_states(again), expected)
        again.close()
        with CheckpointReader(path) as reader:
            alone = same_bits(reader.parameters(), weights)
        version = int((path / "manifest.json").read_text().split('"format_version": ')[1].split(",")[0])
        found.append((version, same, alone))
    return found


def test_any_blocks_load_from_any_others(tmp_path: Path) -> None:
    """And from whole tables, and those that tensor ranks share; without blocks the format is as before."""
    for found in on_ranks(2, loaded_elsewhere, str(tmp_path), ranks_per_node=2):
        for (saved, loads), result in zip([*RESUMES, *SHARED], found, strict=True):
            version = 6 if saved[1] is None else 7 if saved[2] == 1 else 9
            assert result == (version, True, True), (saved, loads)


@pytest.mark.parametrize(
    ("model", "units"), [(MODEL, BLOCKS + 4), (UNTIED, 2 * BLOCKS + 4), (ROPE, BLOCKS + 4)]
)
def test_blocks_take_turns_in_few_slots(model: ModelConfig, units: int) -> None:
    """Two slots for blocks of equal size, at most one for the last block, whatever the number of blocks."""
    engine = build(Topology(), STAGE_3, model=model)
    assert len(engine.units) == units
    blocks = [index for index, unit in enumerate(engine.units) if unit.layout.placements[0].rows is not None]
    full = {
        engine.plan.slots[index] for index in blocks if engine.units[index].parameters[0].shape[0] == ROWS
    }
    last = {engine.plan.slots[index] for index in blocks} - full
    assert (len(full), len(last)) == (2, 1)


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["stored", "full"])
def test_no_pass_waits_for_blocks_that_could_be_gathered_ahead(
    model: ModelConfig, recompute: dict[str, Any]
) -> None:
    """The lookups' backward, which reads no weights, gathers none."""
    engine = build(Topology(), STAGE_3, model=replace(model, num_layers=4), recompute=recompute)
    prefetcher, gathered = engine.weights.prefetcher, []
    gather = prefetcher._gather

    def count(index: int) -> Any:
        gathered.append(index)
        return gather(index)

    prefetcher._gather = count
    assert not any(late for _, late in needed(engine))
    gathered.clear()
    needed(engine)  # two steps more
    first, last = engine.units[0].names, [unit.names for unit in engine.units][-1]
    assert first == ("embedding.tokens.weight",)
    assert gathered.count(0) == 2 * (3 if model is MODEL else 1)  # lookup, loss, and the loss's backward
    assert last == (("head.norm.weight", "head.norm.bias") if model is MODEL else ("head.output.weight",))


def test_orders_of_reads() -> None:
    """Two blocks, three layers of which the last two are recomputed, and the blocks again for the loss."""
    units = ((0,), (1,), (2,), (3,), (4,), (0,), (1,))
    reads = Reads(units, (range(3, 5),), frozenset({0, 1}))
    assert reads.backward == (6, 5, 3, 4, 3, 2)
    assert reads.orders == (units, ((1,), (0,), (3,), (4,), (3,), (2,)))
    assert reads.places == ((0, 5), (1, 6), (2,), (3,), (4,))
