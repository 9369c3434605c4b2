"""Muon beside one in float64, written here, on matrices whose gradients are known exactly."""

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.emulation import muon as emulated
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Axis
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import Layout, Placement
from megatron_zpp.zero import muon, whole_matrices
from megatron_zpp.zero import newton_schulz as newton_schulz_steps
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.whole_matrices import Round, balanced, rounds
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly, run
from tests.zero import engines
from tests.zero.engines import model_of, operations, states_of, weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import AUTO, FOUR_BITS

MATRICES = {
    "first.square": (32, 32),
    "first.twin": (32, 32),
    "first.tall": (40, 24),
    "first.three": (24, 8, 8),  # rows of three matrices
    "second.wide": (17, 65),
    "second.row": (1, 40),
}
SHAPES = MATRICES | {
    "first.three": (40, 20),
    "first.gains": (33,),
    "second.table": (50, 8),
    "second.bias": (7,),
}
ROWS = {name: shape if name == "first.three" else shape[:1] for name, shape in MATRICES.items()}
FOUR = FOUR_BITS | {"zero_stage": 3}
COMPACT = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
RATE, DECAY, SCALED = 0.02, 0.1, 65536.0
SIMPLE = (3.4445, -4.7750, 2.0315)


def drawn(name: str, seed: int) -> Tensor:
    """Numbers of 10 bits, so that sums over a few micro-batches are exact in fp32, and halves of them too."""
    generator = torch.Generator().manual_seed(hash((list(SHAPES).index(name), seed)) % 2**31)
    return torch.randint(-512, 512, SHAPES[name], generator=generator).float() / 1024


class Part(nn.Module):
    def __init__(self, part: str) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            if name.startswith(part):
                self.register_parameter(
                    name.partition(".")[2], nn.Parameter(torch.empty(shape, device="meta"))
                )

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g.to(p)).sum() for p, g in pairs]).sum()


class Model(nn.Module):
    """Its gradients are numbers that the batch draws, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part("first"), Part("second")

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("second", self.second)]

    def recomputed_units(self) -> list[range]:
        return []

    def forward(self, seed: Tensor, _: Tensor) -> Tensor:
        parts = [
            part([drawn(f"{unit}.{name}", int(seed)) for name, _ in part.named_parameters()])
            for unit, part in self.units()
        ]
        return torch.stack(parts).sum()


def initialize(name: str, tensor: Tensor) -> None:
    tensor.copy_(drawn(name, 1_000_000))


def engine_of(
    topology: Topology,
    zero: Mapping[str, Any],
    precision: PrecisionConfig | None = None,
    matrices: Mapping[str, tuple[int, ...]] = ROWS,
    device: str = "cpu",
    operations: Operations | None = None,
    **settings: Any,
) -> ZeroEngine:
    """With steps of Newton-Schulz that shrink no singular value, so that an error stays as it is."""
    return ZeroEngine(
        Model(),
        topology.mesh(),
        EngineConfig(
            zero=ZeroConfig(**zero),
            optimizer=OptimizerConfig(
                optimizer="muon" if matrices else "adam", weight_decay=DECAY, clip_grad=0.0, **settings
            ),
            precision=precision or PrecisionConfig(),
        ),
        initialize=initialize,
        device=torch.device(device),
        matrices=matrices,
        operations=operations,
    )


def train(engine: ZeroEngine, steps: range) -> list[float]:
    """Steps of the same 8 micro-batches on any number of ranks; which steps were skipped."""
    mesh, each, skipped = engine.mesh, 8 // engine.mesh.data_ranks, []
    for step in steps:
        for index in range(each):
            seed = 8 * step + mesh.data_rank * each + index
            engine.accumulate((torch.tensor(seed), torch.zeros(1)), index=index, micro_batches=each)
        skipped.append(engine.step(RATE).skipped.item())
    return skipped


def newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        a, b, c = SIMPLE
        x = u @ torch.diag(a * s + b * s**3 + c * s**5) @ v
    return x


@cache
def expected(
    steps: int, nesterov: bool = False, beta2: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of matrices after so many steps, in float64, and the last change of each."""
    weights, changes = {}, {}
    for name, rows in ROWS.items():
        weight, average = drawn(name, 1_000_000).double(), torch.zeros(SHAPES[name], dtype=torch.float64)
        rows_squared = torch.zeros(len(weight), 1, dtype=torch.float64)
        for step in range(steps):
            gradient = sum(drawn(name, 8 * step + index).double() for index in range(8)) / 8
            average = 0.9 * average + 0.1 * gradient
            used = 0.9 * average + 0.1 * gradient if nesterov else average
            parts = [newton_schulz(part) for part in used.split(list(rows))]
            if beta2 is not None:
                rows_squared = beta2 * rows_squared + (1 - beta2) * (torch.cat(parts) ** 2).mean(1)[:, None]
                scaled = (torch.cat(parts) / rows_squared.sqrt()).split(list(rows))
                parts = [new * old.norm() / new.norm() for old, new in zip(parts, scaled, strict=True)]
            changes[name] = RATE * torch.cat([part * math.sqrt(max(part.shape)) for part in parts])
            weight = (1 - RATE * DECAY) * weight - changes[name]
        weights[name] = weight
    return weights, changes


def found(
    topology: Topology,
    zero: dict[str, Any],
    nesterov: bool,
    device: str = "cpu",
    beta2: float | None = None,
) -> dict[str, list]:
    settings = {"muon_coefficient_type": "simple", "muon_nesterov": nesterov, "muon_row_scaling_beta2": beta2}
    settings["device"] = device
    engine = engine_of(topology, zero, PrecisionConfig(fp32=True), **settings)
    train(engine, range(3))
    weights = weights_of(engine)
    engine.close()
    return {name: weight.tolist() for name, weight in weights.items()}


UPDATES = [*((stage, None) for stage in range(4)), (0, 0.75), (3, 0.75)]  # stages, and beta2 of rows


def updated(topology: Topology) -> list[dict[str, list]]:
    return [found(topology, {"zero_stage": stage}, stage == 2, beta2=beta2) for stage, beta2 in UPDATES]


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (4, 2), nightly(8, 2), nightly(8, 1)])
def test_updates_are_those_of_float64(ranks: int, per_node: int) -> None:
    for rank in on_ranks(ranks, updated, ranks_per_node=per_node):
        for (stage, beta2), weights in zip(UPDATES, rank, strict=True):
            check(weights, *expected(3, stage == 2, beta2))


@pytest.mark.parametrize("beta2", [None, 0.75])
def test_the_emulator_has_the_same_updates(beta2: float | None) -> None:
    weights, changes = expected(3, nesterov=True, beta2=beta2)
    settings = emulated.MuonSettings(
        momentum=0.9, weight_decay=emulated.SCALE * DECAY, coefficient_type="simple", beta2=beta2
    )
    for name, rows in ROWS.items():
        master, columns = drawn(name, 1_000_000).flatten(), SHAPES[name][1]
        matrices: dict[tuple[int, int], list[slice]] = {}
        for first, count in zip(accumulate(rows, initial=0), rows, strict=False):
            here = slice(first * columns, (first + count) * columns)
            matrices.setdefault((count, columns), []).append(here)
        one = emulated.Muon(torch.zeros_like(master), matrices, settings, torch.float32)
        for step in range(3):
            gradient = torch.stack([drawn(name, 8 * step + index) for index in range(8)]).mean(0)
            one.step(master, gradient.flatten(), RATE / emulated.SCALE, torch.zeros(()))
        check({name: master.view(SHAPES[name]).tolist()}, {name: weights[name]}, changes)


def ahead(topology: Topology) -> list[Any]:
    """Weights with all units in one round, and with a round for each; what is done with rounds, in order."""
    one = found(topology, {}, nesterov=True)
    calls = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(whole_matrices, "_LEAST", 1)
        patched.setattr(whole_matrices, "_IMBALANCE", math.inf)
        for name in ("gather", "scatter"):
            patched.setattr(Round, name, recorded(calls, getattr(Round, name)))
        patched.setattr(muon, "orthogonalize_", recorded(calls, muon.orthogonalize_))
        return [one, found(topology, {}, nesterov=True), calls]


def recorded(calls: list[str], of: Callable) -> Callable:
    def call(*given: Any) -> Any:
        calls.append(of.__name__)
        return of(*given)

    return call


def test_matrices_of_the_next_round_come_together_while_a_round_is_worked_on() -> None:
    for one, each, calls in on_ranks(2, ahead):
        assert one == each
        assert calls[:2] == ["gather", "gather"]
        assert calls.count("gather") == calls.count("scatter") == 6


def check(rank: dict[str, list], weights: dict[str, Tensor], changes: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        assert (torch.tensor(rank[name]) - weight).norm() < 1e-5 * changes[name].norm(), name


@pytest.mark.parametrize(
    ("kind", "multiple"), [("simple", 1), ("quintic", 5), ("polar_express", 1), ("aol", 4)]
)
def test_steps_without_coefficients_are_refused(kind: str, multiple: int) -> None:
    for steps in range(1, 11):
        settings: dict[str, Any] = {"muon_coefficient_type": kind, "muon_num_ns_steps": steps}
        if steps % multiple == 0:
            OptimizerConfig(optimizer="muon", **settings)
            assert len(newton_schulz_steps.coefficients(kind, steps)) == steps
            continue
        said = f"--muon-num-ns-steps {steps}: must be a multiple of {multiple} with --muon-coefficient-type"
        with pytest.raises(ValueError, match=said):
            OptimizerConfig(optimizer="muon", **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "given"), newton_schulz_steps.COEFFICIENTS.items())
def test_no_singular_value_becomes_negative(kind: str, given: tuple, dtype: torch.dtype) -> None:
    """Of matrices of norm 1, nor the largest there can be: 1, that of a matrix of rank one."""
    first = torch.linspace(0.02, 1, 99)
    matrices = torch.stack([first, (1 - first**2).sqrt()], 1).diag_embed().to(dtype)
    newton_schulz_steps.orthogonalize_(matrices, given * 5 if kind == "simple" else given)
    values = matrices.float().diagonal(dim1=1, dim2=2)
    assert (values[:, 0] > 0.6).all()
    assert (values[:-1, 1] > 0.6).all()


def test_in_bf16_singular_values_of_an_update_are_near_one() -> None:
    """All but those that are tiny in the gradient, which five steps do not bring so far."""
    engine = engine_of(Topology(), {}, PrecisionConfig(bf16=True))
    before = weights_of(engine)
    train(engine, range(1))
    after = weights_of(engine)
    for name, rows in ROWS.items():
        change = (1 - RATE * DECAY) * before[name] - after[name]
        gradient = torch.stack([drawn(name, seed) for seed in range(8)]).mean(0)
        for part, made_of in zip(change.split(list(rows)), gradient.split(list(rows)), strict=True):
            values = torch.linalg.svdvals(part.double()) / (RATE * math.sqrt(max(part.shape)))
            counted = values[torch.linalg.svdvals(made_of) > 0.01 * made_of.norm()]
            assert counted.min() > 0.65, name
            assert counted.max() < 1.25, name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none")
def test_in_bf16_updates_are_those_of_torchs_muon() -> None:
    """Up to its scale of an update. Both round 15 products in a row to 2^-9."""
    engine = engine_of(Topology(), {}, PrecisionConfig(bf16=True), muon_coefficient_type="simple")
    names = [name for name, rows in ROWS.items() if len(rows) == 1]
    theirs = {name: nn.Parameter(drawn(name, 1_000_000)) for name in names}
    settings: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "ns_coefficients": SIMPLE}
    optimizer = torch.optim.Muon(theirs.values(), lr=RATE, weight_decay=DECAY, **settings)
    for name, parameter in theirs.items():
        parameter.grad = torch.stack([drawn(name, seed) for seed in range(8)]).mean(0)
    before = weights_of(engine)
    optimizer.step()
    train(engine, range(1))
    after = weights_of(engine)
    for name, parameter in theirs.items():
        rows, columns = parameter.shape
        ours, other = ((1 - RATE * DECAY) * before[name] - new for new in (after[name], parameter.detach()))
        other *= math.sqrt(max(rows, columns) / max(1, rows / columns))
        assert (ours - other).norm() < 2**-4 * ours.norm(), name


def other_optimizer(topology: Topology) -> dict[str, list]:
    """Weights that Muon's AdamW trains, and AdamW alone."""
    both = []
    for matrices in (ROWS, {}):
        engine = engine_of(topology, {}, matrices=matrices)
        train(engine, range(3))
        both.append({name: w.tolist() for name, w in weights_of(engine).items() if name not in ROWS})
        engine.close()
    return both


def test_what_is_no_matrix_is_trained_by_adamw() -> None:
    for with_muon, alone in on_ranks(2, other_optimizer):
        assert with_muon == alone


def with_codes(topology: Topology) -> list[Any]:
    """Weights with and without codes in messages, of which the compute reads those that are not sent."""
    found, some = list[Any](), {name: rows for name, rows in ROWS.items() if name.startswith("first")}
    for zero in ({"zero_quantized_weights": True}, {}):
        settings = {"zero": zero | {"zero_stage": 2}, "operations": operations(), "matrices": some}
        engine = engine_of(topology, precision=PrecisionConfig(bf16=True), **settings)
        train(engine, range(2))
        found.append({name: weight.tolist() for name, weight in weights_of(engine).items()})
        held = [unit for unit in engine.units if not unit.plan.first]
        found.append([torch.equal(unit.full, unit.master.bfloat16()) for unit in held])
        engine.close()
    return found


def test_what_each_node_holds_by_itself_is_no_message() -> None:
    """On nodes of one rank, where no weights of a unit with matrices are sent, and codes of the other."""
    for coded, are_weights, plain, _ in on_ranks(2, with_codes, ranks_per_node=1):
        assert coded == plain
        assert are_weights == [True]


def total_owed(states: dict[str, dict[str, list]]) -> dict[str, Tensor]:
    """What messages of all ranks have lost so far, by parameter."""
    kinds = [kind for kind in states if "residual" in kind]
    return {
        name: torch.stack([torch.tensor(states[kind][name]) for kind in kinds]).sum(0)
        for name in states[kinds[0]]
    }


def loaded(topology: Topology, zero: dict[str, Any], path: str) -> dict[str, dict[str, list]]:
    """States after loading a checkpoint."""
    engine = in_fp16(topology, zero)
    load_checkpoint(Path(path), engine, TOKENIZER, with_optimizer=True)
    states = lists(engine)
    engine.close()
    return states


def telescoped(topology: Topology, zero: dict[str, Any], device: str = "cpu") -> list[dict[str, list]]:
    """The sums over steps of what has arrived of gradients, what is owed at the end, and after a NaN."""
    engine, arrived = in_fp16(topology, zero, muon_momentum=0.0, device=device), dict[str, Tensor]()
    for step in range(3):
        assert train(engine, range(step, step + 1)) == [0.0]
        for name, gradient in states_of(engine, "momentum_buffer").items():
            if name in ROWS:
                arrived[name] = arrived.get(name, 0) + gradient
    owed = total_owed(lists(engine))
    engine.units[0].parameters[0].register_hook(lambda gradient: gradient * torch.nan)
    assert train(engine, range(1)) == [1.0]
    after = lists(engine)
    engine.close()
    assert not any(
        torch.tensor(each).any() for kind in after if "residual" in kind for each in after[kind].values()
    )
    return [{name: each.tolist() for name, each in found.items()} for found in (arrived, owed)]


@pytest.mark.parametrize(
    ("zero", "ranks", "per_node"),
    [(FOUR, 4, 2), (FOUR | AUTO, 4, 2), (FOUR | {"zero_quantized_gradients_format": "int4"}, 2, 1)],
    ids=["rotated4", "in groups", "int4 on one rank per node"],
)
def test_what_four_bits_lose_of_gradients_arrives_later(
    zero: dict[str, Any], ranks: int, per_node: int
) -> None:
    """Of several micro-batches; inside nodes nothing is lost but by codes of 8 bits."""
    for arrived, owed in on_ranks(ranks, telescoped, zero, ranks_per_node=per_node):
        check_owed(arrived, owed)


def check_owed(arrived: dict[str, list], owed: dict[str, list]) -> None:
    """What has not arrived of the gradients of three steps is owed."""
    for name in ROWS:
        gradient = sum(drawn(name, seed).double() for seed in range(24)) / 8
        lost = gradient - torch.tensor(arrived[name])
        assert (lost - torch.tensor(owed[name])).norm() < 0.02 * gradient.norm(), name
        assert lost.norm() > 0.03 * gradient.norm(), name


def in_bf16(topology: Topology, stage: int) -> dict[str, list]:
    """Momentum after three steps, of which every element is rounded by its number."""
    settings = COMPACT | {"operations": operations(), "muon_momentum": 0.75}
    engine = engine_of(topology, {"zero_stage": stage}, PrecisionConfig(fp32=True), **settings)
    train(engine, range(3))
    states = states_of(engine, "momentum_buffer")
    assert engine.states.forms()["momentum_buffer"] == "bfloat16"
    engine.close()
    return {name: states[name].tolist() for name in ROWS}


def test_momentum_in_bf16_is_rounded_alike_on_any_shards() -> None:
    (one,) = on_ranks(1, in_bf16, 0)
    for found in [*on_ranks(2, in_bf16, 3), *on_ranks(2, in_bf16, 1, ranks_per_node=1)]:
        assert found == one
    for name, momentum in one.items():
        exact = torch.zeros(SHAPES[name], dtype=torch.float64)
        for step in range(3):
            gradient = sum(drawn(name, 8 * step + index).double() for index in range(8)) / 8
            exact = 0.75 * exact + 0.25 * gradient
        assert 0 < (torch.tensor(momentum) - exact).norm() < 2**-7 * exact.norm()


def lists(engine: ZeroEngine) -> dict[str, dict[str, list]]:
    states = {kind: states_of(engine, kind) for kind in engine.states.kinds}
    states["row_moments"] = engine.states.row_moments()
    return {kind: {name: state.tolist() for name, state in each.items()} for kind, each in states.items()}


def in_fp16(topology: Topology, zero: dict[str, Any], **settings: Any) -> ZeroEngine:
    precision = PrecisionConfig(fp16=True, loss_scale=1024.0)
    settings |= {"operations": operations() if zero else None, "muon_row_scaling_beta2": 0.75}
    return engine_of(topology, zero, precision, **settings)


def resumed(topology: Topology, zero: dict[str, Any], directory: str) -> list[dict[str, dict[str, list]]]:
    """States after two steps; after four; and after four of which two follow a checkpoint."""
    engine, other = (in_fp16(topology, zero, **(COMPACT if zero else {})) for _ in range(2))
    train(engine, range(2))
    found = [lists(engine)]
    path = save(Path(directory), engine, Progress(iteration=2))
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    for each in (engine, other):
        assert train(each, range(2, 4)) == [0.0, 0.0]
        found.append(lists(each))
        each.close()
    return found


@pytest.mark.parametrize("zero", [{}, FOUR], ids=["", "4 bits"])
def test_a_run_resumes_bit_for_bit_and_its_states_load_on_any_mesh(
    zero: dict[str, Any], tmp_path: Path
) -> None:
    ranks = on_ranks(4, resumed, zero, str(tmp_path), ranks_per_node=2)
    saved, straight, again = ranks[0]
    assert again == straight
    assert ranks[1:] == ranks[:1] * 3
    assert all(saved[kind] != straight[kind] for kind in ("momentum_buffer", "row_moments"))
    (path,) = tmp_path.glob("iter_*")
    engine = in_fp16(Topology(), {})
    load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
    found = lists(engine)
    assert found == {kind: saved[kind] for kind in found}
    assert len(saved) - len(found) == (3 if zero else 0)  # of two nodes, and of sums
    for rank in on_ranks(3, loaded, zero, str(path), ranks_per_node=1) if zero else ():
        assert rank["row_moments"] == saved["row_moments"]
        for name, owed in total_owed(saved).items():
            of_sums = torch.tensor(rank["residual_of_sums"][name])
            assert torch.allclose(of_sums, owed, rtol=2**-8, atol=1e-9)
    with pytest.raises(ValueError, match="add --optimizer muon, or --no-load-optim"):
        load_checkpoint(path, engine_of(Topology(), {}, matrices={}), TOKENIZER, with_optimizer=True)


def test_a_nan_changes_nothing_and_adamws_checkpoint_begins_without_momentum(tmp_path: Path) -> None:
    adamw = engine_of(Topology(), {}, matrices={})
    train(adamw, range(2))
    engine = engine_of(Topology(), {}, muon_row_scaling_beta2=0.75)
    load_checkpoint(save(tmp_path, adamw, Progress(2)), engine, TOKENIZER, with_optimizer=True)
    before = lists(engine)
    assert not any(state.any() for state in states_of(engine, "momentum_buffer").values())
    hook = engine.units[0].parameters[0].register_hook(lambda gradient: gradient * torch.nan)
    assert train(engine, range(1)) == [1.0]
    assert lists(engine) == before
    hook.remove()
    assert train(engine, range(1)) == [0.0]
    assert lists(engine)["row_moments"] != before["row_moments"]


@pytest.mark.parametrize(("layers", "hidden"), [(24, 2048), (40, 5120)], ids=["1.3B", "13B"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_of_a_node_have_equal_work(layers: int, hidden: int, ranks: int) -> None:
    """Of the slowest rank of each round beside the mean; a node has as much as any other."""
    shapes = {"qkv": (hidden,) * 3, "output": (hidden,), "input": (4 * hidden,), "back": (hidden,)}
    layout = Layout(
        placements=tuple(
            Placement(name=name, shape=(sum(rows), 4 * hidden if name == "back" else hidden), matrices=rows)
            for name, rows in shapes.items()
        ),
        axes=(Axis(1, ranks),),
    )
    assert layout.numel <= 1.05 * sum(math.prod(each.shape) for each in layout.placements)
    slowest = total = 0.0
    for work in rounds([layout] * layers, ranks):
        costs = [matrix.cost for matrix in work]
        slowest += balanced(costs, ranks)[1] * sum(costs)
        total += sum(costs)
    assert slowest <= 1.1 * total


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_tritons_interpreter() -> None:
    calls = [
        *(f"passes_are_those_of_plain_torch({unit}, tests.HALF, {unit // 4})" for unit in (1, 4)),
        *(f"half_of_a_symmetric_product_is_the_whole((2, 192, 128), {turned})" for turned in (False, True)),
    ]
    lines = ["from tests.gpu import test_muon as tests", *(f"tests.test_{call}" for call in calls)]
    done = run("-c", "\n".join(lines), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


GPT = model_of(hidden_size=24, num_attention_heads=4, seq_length=12, swiglu=True)


def trained_gpt(topology: Topology, tensor: int, stage: int) -> list[dict[str, list]]:
    """Weights of a GPT before and after three steps on the same samples, whatever the ranks."""
    optimizer = OptimizerConfig(optimizer="muon", weight_decay=DECAY, muon_row_scaling_beta2=0.75)
    engine = engines.engine_of(
        GPT,
        102,
        zero=ZeroConfig(zero_stage=stage),
        optimizer=optimizer,
        topology=topology,
        tensor=tensor,
        matrices=trained_matrices(GPT, optimizer),
    )
    found = [weights_of(engine)]
    for step in range(3):
        engine.accumulate(torch.randint(102, (3, 13), generator=torch.Generator().manual_seed(step)))
        engine.step(RATE)
    found.append(weights_of(engine))
    engine.close()
    return [{name: weight.tolist() for name, weight in weights.items()} for weights in found]


@pytest.mark.parametrize("stage", [0, 3])
def test_matrices_that_tensor_ranks_share_come_together_whole(stage: int) -> None:
    """Runs of rows and columns, on two data ranks of two tensor ranks; rounding aside as on one rank.

    AdamW's biases differ more: gradients of the keys' are nothing but rounding, which it makes large.
    """
    before, after = trained_gpt(Topology(), 1, 0)
    for _, found in on_ranks(4, trained_gpt, 2, stage):
        for name, weight in after.items():
            new, bound = torch.tensor(weight), 1e-3 if name.endswith("bias") else 1e-5
            moved = new - torch.tensor(before[name])
            assert (torch.tensor(found[name]) - new).norm() < bound * moved.norm(), name
