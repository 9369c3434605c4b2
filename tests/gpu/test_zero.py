"""ZeRO on GPUs: several ranks over NCCL, no host synchronisation, no allocation in a steady step."""

import dataclasses
import gc
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed import copy_engine_trial as trial
from megatron_zpp.distributed.symmetric_memory import SymmetricMemory
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.supervision.errors import one_line_errors
from megatron_zpp.train.setup.build_engine import DECOUPLED
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.ranks import GPUS, on_gpus
from tests.gpu.steady import assert_steady, step_of
from tests.model.variants import MODELS
from tests.support import logged, trained
from tests.zero.engines import engine_of

VOCAB = 1000
COMPACT = OptimizerConfig(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="fp8",
    exp_avg_sq_dtype="fp8",
    main_params_dtype="bf16+8",
)
IN_BACKWARD = dataclasses.replace(COMPACT, optimizer_in_backward=True)
MODEL = ModelConfig(num_layers=6, hidden_size=256, num_attention_heads=4, seq_length=128)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        (PrecisionConfig(bf16=True), OptimizerConfig()),
        (PrecisionConfig(fp16=True), OptimizerConfig()),
        (PrecisionConfig(bf16=True), COMPACT),
        (PrecisionConfig(bf16=True), IN_BACKWARD),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_steady_step_neither_waits_for_the_device_nor_allocates(
    stage: int, precision: PrecisionConfig, optimizer: OptimizerConfig
) -> None:
    engine = engine_of(
        MODEL,
        VOCAB,
        zero=ZeroConfig(zero_stage=stage),
        precision=precision,
        optimizer=optimizer,
        operations=load_operations("cuda", require_kernels=True, say=print),
        device="cuda",
    )
    tokens = torch.randint(VOCAB, (4, 129), device="cuda")
    micro_batches = 1 if optimizer.optimizer_in_backward else 2
    assert_steady(lambda: step_of(engine, tokens, micro_batches), warmup=3)


@pytest.mark.parametrize(
    ("optimizer", "micro_batches", "nbytes"), [(COMPACT, 1, 7.2), (COMPACT, 4, 9.2), (IN_BACKWARD, 1, 5.2)]
)
def test_compact_states_and_gradients_take_the_bytes_that_are_aimed_at(
    optimizer: OptimizerConfig, micro_batches: int, nbytes: float
) -> None:
    """By the allocator, all scales included; few tokens, so that activations take a thousandth of it.

    Before the optimizer's step or, where units step in the backward, at the peak of forward and backward.
    """
    one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    torch.addmm(one[0], one, one)  # cuBLAS takes 32 MiB of its own for the first product
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = engine_of(
        ModelConfig(num_layers=32, hidden_size=2048, num_attention_heads=16, seq_length=16),
        VOCAB,
        precision=PrecisionConfig(bf16=True),
        optimizer=optimizer,
        operations=load_operations("cuda", require_kernels=True, say=print),
        device="cuda",
    )
    elements, held = sum(unit.layout.numel for unit in engine.units), []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        if optimizer.optimizer_in_backward:
            engine.begin_step(1e-4)
        for index in range(micro_batches):
            tokens = torch.randint(VOCAB, (1, 17), device="cuda")
            engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        in_use = torch.cuda.memory_allocated()  # with the gradients, of which the step is next
        peak = torch.cuda.max_memory_allocated()
        held.append((peak if optimizer.optimizer_in_backward else in_use) - before)
        engine.step(1e-4)
    assert max(held) <= nbytes * elements
    engine.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("stage", "table_rate"), [(0, None), (3, 3e-3)])
def test_an_offloaded_optimizer_takes_the_same_steps(
    stage: int, table_rate: float | None, model: str
) -> None:
    """AdamW's states leave the GPU; the weights differ by the CPU's rounding of a step alone."""
    mup = {} if table_rate is None else {"use_mup": True, "mup_base_hidden_size": MODEL.hidden_size // 4}
    config = dataclasses.replace(MODEL, **MODELS[model], **mup)

    def build(offload: bool) -> ZeroEngine:
        return engine_of(
            config,
            VOCAB,
            zero=ZeroConfig(zero_stage=stage, zero_offload_optimizer=offload),
            precision=PrecisionConfig(bf16=True),
            device="cuda",
            decoupled=() if table_rate is None else DECOUPLED[:1],
        )

    build(offload=False).close()  # frees what earlier tests left, which must not happen between two readings
    curves, allocated = [], []
    for offload in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = build(offload)
        allocated.append(torch.cuda.memory_allocated() - before)
        losses = []
        for step in range(10):
            torch.manual_seed(step)
            tokens = torch.randint(VOCAB, (4, 129), device="cuda")
            losses.append(engine.accumulate(tokens, index=0, micro_batches=1).item())
            engine.step(1e-3, table_rate)
        curves.append(losses)
        elements = sum(unit.layout.numel for unit in engine.units)
        engine.close()
        del engine
    assert curves[1] == pytest.approx(curves[0], rel=2 * torch.finfo(torch.bfloat16).eps)
    assert allocated[0] - allocated[1] >= 12 * elements


@pytest.mark.parametrize("quantized", [False, True])
def test_a_skipped_step_of_an_offloaded_optimizer_publishes_nothing(quantized: bool) -> None:
    """The first fp16 step overflows by design, when the staging memory holds no weights yet."""
    engine = engine_of(
        MODEL,
        VOCAB,
        zero=ZeroConfig(zero_stage=3, zero_offload_optimizer=True, zero_quantized_weights=quantized),
        precision=PrecisionConfig(fp16=True),
        device="cuda",
        operations=load_operations("cuda", require_kernels=True, say=print),
    )
    before = [unit.gather_source.clone() for unit in engine.units]
    tokens = torch.randint(VOCAB, (4, 129), device="cuda")
    engine.accumulate(tokens, index=0, micro_batches=1)
    assert engine.step(1e-3).skipped
    assert all(torch.equal(unit.gather_source, old) for unit, old in zip(engine.units, before, strict=True))


FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")


def requested_bytes() -> int:
    """Of live tensors, without what the allocator rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_offloaded_activations_change_nothing_but_memory(method: str, model: str) -> None:
    """Checkpoints of 6 layers: all but the newest two are in CPU memory when the backward begins."""
    tokens = torch.randint(VOCAB, (64, 129), device="cuda")
    curves, stored, config = [], [], dataclasses.replace(MODEL, **MODELS[model])
    for offload in (False, True):
        layers = 5 if method == "block" else None
        recompute = dataclasses.replace(
            FULL, recompute_method=method, recompute_num_layers=layers, recompute_offload=offload
        )
        engine = engine_of(
            config, VOCAB, recompute=recompute, precision=PrecisionConfig(bf16=True), device="cuda"
        )
        losses = []
        for step in range(5):
            for index in range(2):
                torch.manual_seed(10 * step + index)
                losses.append(engine.accumulate(tokens, index=index, micro_batches=2).item())
            engine.step(1e-3)
        curves.append(losses)
        engine.model.train()
        before = requested_bytes()
        loss = engine._loss(tokens)
        stored.append(requested_bytes() - before)
        del loss
        engine.close()
        del engine
    assert curves[0] == curves[1]
    checkpoint = 64 * 128 * 256 * 2  # bytes of one (B, T, D) in bf16
    assert stored[0] - stored[1] >= 4 * checkpoint


def blocked(*arguments: object) -> None:
    raise RuntimeError("no handle of another process's memory")


def losses_of_copy_engines(
    topology: Topology, failing: int | None, where: str
) -> tuple[bool, list[str], list[float], int]:
    """(whether copy engines are used, lines said, losses of three steps, seconds of the start) of a rank."""
    if topology.rank == failing:
        setattr(
            *{
                "handles": (trial, "peer_memory"),
                "memory": (SymmetricMemory, "allocating"),
                "windows": (SymmetricMemory, "register"),
            }[where],
            blocked,
        )
    with torch.device("meta"):
        model = GPT(MODEL, VOCAB)
    said, started = [], time.monotonic()
    engine = ZeroEngine(
        model,
        topology.mesh(),
        EngineConfig(zero=ZeroConfig(zero_stage=3), precision=PrecisionConfig(bf16=True)),
        initialize=partial(model.initialize_parameter, seed=3),
        device=torch.device("cuda", topology.local_rank),
        say=said.append,
    )
    seconds, losses = int(time.monotonic() - started), []
    for step in range(3):
        torch.manual_seed(10 * step + topology.rank)
        tokens = torch.randint(VOCAB, (4, 129), device=engine.device)
        losses.append(engine.accumulate(tokens, index=0, micro_batches=1).item())
        engine.step(1e-3)
    used = engine.plan.copy_engines
    engine.close()
    return used, said, losses, seconds


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("where", ["handles", pytest.param("memory", marks=pytest.mark.gpu_long)])
def test_ranks_that_cannot_exchange_handles_fall_back_together(where: str) -> None:
    """The second rank alone fails. Losses may differ a little: attention sums in no fixed order."""
    used = on_gpus(1, 2, losses_of_copy_engines, None, where)
    fallen_back = on_gpus(1, 2, losses_of_copy_engines, 1, where)
    assert [rank[:2] for rank in used] == [(True, [])] * 2
    for rank, (uses_copy_engines, said, losses, seconds) in enumerate(fallen_back):
        assert not uses_copy_engines
        assert len(said) == (rank == 0)
        assert losses == pytest.approx(used[rank][2], rel=torch.finfo(torch.bfloat16).eps)
        assert seconds < 60
    assert "no handle of another process's memory [rank 1]" in fallen_back[0][1][0]


def end_with_reason(topology: Topology, said: Path) -> None:
    """Fail in registering, and end as a run does."""
    with one_line_errors("test", topology, say=lambda message, line: said.write_text(line)):
        losses_of_copy_engines(topology, 1, "windows")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_rank_that_cannot_register_ends_with_its_reason(tmp_path: Path) -> None:
    """The other rank stays in NCCL's call, which nothing ends but the end of its process."""
    said = tmp_path / "said"
    with pytest.raises(ProcessExitedException, match="terminated with exit code 1"):
        on_gpus(1, 2, end_with_reason, said)
    assert (
        "no handle of another process's memory [rank 1]; other ranks still wait for it; "
        "set NCCL_CUMEM_ENABLE=0 on all ranks"
    ) in said.read_text()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.gpu_long), 3])
def test_two_gpus_equal_one(tmp_path: Path, accumulation: int) -> None:
    """fp32, no dropout: the loss of every step at every stage. Compiling would make minutes of it."""
    command = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 999 --num-layers 4 --hidden-size 100 "
        "--num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --fp32 --lr 1e-3 --train-iters 6 "
        f"--global-batch-size {4 * accumulation} --log-interval 1 --eval-iters 1 --num-workers 0 --no-compile"
    ).split()
    curves = {}
    for name, processes, extra in (
        ("one", 1, []),
        *((f"stage {stage}", 2, ["--zero-stage", str(stage)]) for stage in range(4)),
    ):
        path = tmp_path / f"{name}.jsonl"
        trained(*command, *extra, "--metrics-file", str(path), processes=processes)
        curves[name] = logged(path)
    for name, losses in curves.items():
        assert losses == pytest.approx(curves["one"], rel=1e-6), name
