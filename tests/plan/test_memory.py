"""The plan's memory: against what torch's allocator hands out here, and what two H200s reported."""

import dataclasses
import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.model.build import build_model
from megatron_zpp.model.fp8.cast import factors_of
from megatron_zpp.model.fp8.matmuls import DelayedMatmuls
from megatron_zpp.model.fp8.output import OutputProduct, part_rows
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import Objective, keeps_gradient, linear_cross_entropy
from megatron_zpp.model.masks import CAUSAL
from megatron_zpp.model.matmuls import PLAIN_MATMULS
from megatron_zpp.plan.activations import layer_bytes, loss_bytes
from megatron_zpp.plan.memory import copies_bytes, memory_of, pinned_bytes
from megatron_zpp.train.setup.compiling import compile_parts
from tests.model.variants import LLAMA
from tests.plan.jobs import FOUR_BITS, FULL, HPZ, NO_DROPOUT, QGZ, QWZ, engine_of, job_of
from tests.support import GROUPED_FLASH, nightly
from tests.zero.test_closed_forms import live_bytes

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")
BF16 = {"bf16": True}
SHAPE = {"num_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128} | NO_DROPOUT
WIDE = {"seq_length": 16, "micro_batch_size": 1}  # few tokens: parameters decide
STEPPED = {"micro_batches": 1, "optimizer": OptimizerConfig(optimizer_in_backward=True)}
LONG = {"micro_batch_size": 4, "vocab": 100}  # and here the layers do
IN_CHUNKS = {"mlp_chunks_for_training": 4}
UNTIED = {"untie_embeddings_and_output_weights": True}
ALL = {"zero_stage": 3} | QWZ | HPZ | QGZ
ADAMW, MUON = (OptimizerConfig(optimizer=name, weight_decay=0.1) for name in ("adam", "muon"))
FP8 = OptimizerConfig(use_precision_aware_optimizer=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")
SPLIT = dataclasses.replace(FP8, main_params_dtype="bf16+8")
IN_BACKWARD = dataclasses.replace(SPLIT, optimizer_in_backward=True)


def allocated_at_most(engine: Any, tokens: torch.Tensor, micro_batches: int) -> int:
    """The peak of a second step: after the first one the states are all there."""

    def step() -> None:
        if engine._in_backward is not None:
            engine.begin_step(1e-3)
        for index in range(micro_batches):
            engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        engine.step(1e-3)

    step()
    return peak_of(step)


def peak_of(run: Callable[[], None]) -> int:
    """The peak of the CPU allocator during `run`, above the memory in use before it.

    What a matrix product takes and gives back before it returns does not count: some processors convert
    16-bit numbers.
    """
    gc.collect()  # engines of earlier tests are cycles, and would be freed in between
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        run()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    products = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in PRODUCTS]
    begins = [begin for begin, _ in products]
    now = peak = 0
    inside = None  # which product the last event was in
    for event in events:
        if event.name() != "[memory]":
            continue
        index = bisect_right(begins, event.start_ns()) - 1
        product = index if index >= 0 and event.start_ns() <= products[index][1] else None
        if product is None or product != inside:
            peak = max(peak, now)
        now += event.nbytes()
        inside = product
    return max(peak, now)


@pytest.mark.parametrize(
    ("zero", "recompute", "precision", "changes"),
    [
        ({}, {}, BF16, {}),
        ({}, {}, {"fp16": True}, {"untie_embeddings_and_output_weights": True}),
        ({}, {"recompute_granularity": "selective"}, BF16, {"vocab": 100}),
        nightly({}, FULL | {"recompute_num_layers": 3}, BF16, LONG),
        ({}, FULL | {"recompute_method": "block", "recompute_num_layers": 4}, BF16, LONG),
        nightly({"zero_stage": 2}, {}, BF16, {"micro_batches": 3}),
        ({"zero_stage": 3}, FULL, BF16, {"micro_batches": 2}),
        ({"zero_stage": 3}, {}, BF16, WIDE | {"vocab": 8000}),
        ({"zero_stage": 2}, {}, {"grad_reduce_in_bf16": True, "fp32": True}, WIDE | {"micro_batches": 2}),
        nightly({"zero_stage": 3, "zero_unit": "sublayer"}, FULL, BF16, {"micro_batches": 2}),
        ({"zero_stage": 1, "zero_unit": "sublayer"}, {}, {"fp32": True}, WIDE | {"micro_batches": 2}),
        nightly({"zero_stage": 3}, {}, {"fp32": True}, WIDE | {"vocab": 8000} | UNTIED),
        ({"zero_stage": 3}, {}, BF16, {"optimizer": MUON}),
        ({"zero_stage": 3}, FULL, {"fp32": True}, WIDE | {"optimizer": MUON}),  # at Newton-Schulz's peak
        ({"zero_stage": 1}, {}, BF16, {"optimizer": SPLIT}),
        ({"zero_stage": 3} | QWZ, {}, BF16, {"optimizer": FP8}),
        nightly({}, IN_CHUNKS, BF16, LONG | {"ffn_hidden_size": 2048}),
        nightly({"zero_stage": 3}, FULL | IN_CHUNKS, BF16, LONG | {"micro_batch_size": 16}),
        ({"zero_stage": 1, "zero_unit": "sublayer"}, FULL | IN_CHUNKS, {"fp32": True}, LONG),
        ({}, {}, {"fp32": True}, STEPPED | WIDE),
        ({}, FULL, {"fp32": True}, STEPPED | LONG),
        ({"zero_unit": "sublayer"}, {}, {"fp32": True}, STEPPED | WIDE | UNTIED),
    ],
)
def test_a_step_allocates_what_the_plan_says(
    zero: dict, recompute: dict, precision: dict, changes: dict
) -> None:
    """Within 5% of the memory above the states, and within 0.1% of the states.

    A step of one micro-batch is for GPUs to try, as are large tables: a CPU copies 16-bit gradients for their
    norm, and for their sum with fp32 ones a parameter at a time.
    """
    settings = SHAPE | {"vocab": 500, "micro_batch_size": 2, "micro_batches": 2, "optimizer": ADAMW} | changes
    vocab, size, micro_batches, optimizer = (
        settings.pop(name) for name in ("vocab", "micro_batch_size", "micro_batches", "optimizer")
    )
    model = ModelConfig(**settings)
    job = job_of(
        model,
        vocab,
        zero=zero,
        recompute=recompute,
        precision=PrecisionConfig(**precision),
        micro_batch_size=size,
        micro_batches=micro_batches,
        optimizer=optimizer,
        device="cpu",
    )
    engine, planned = engine_of(job), memory_of(job)
    peak = allocated_at_most(engine, torch.randint(vocab, (size, model.seq_length + 1)), micro_batches)
    states = live_bytes(engine)
    assert planned.resident == pytest.approx(states, rel=1e-3)
    assert planned.peak - planned.resident == pytest.approx(peak, rel=0.05)


def test_what_decides_whether_a_model_fits_on_one_gpu() -> None:
    """Bytes per parameter of states and gradients, scales included: the aims of the flags, and fp32's."""
    model = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=8)
    for micro_batches, optimizer, nbytes in (
        (1, IN_BACKWARD, 5.2),
        (1, SPLIT, 7.2),
        (4, SPLIT, 9.2),
        (1, ADAMW, 16),
        (4, ADAMW, 18),
    ):
        job = job_of(model, 1000, micro_batches=micro_batches, optimizer=optimizer)
        memory, total = memory_of(job), sum(layout.numel for layout in job.layouts)
        per_parameter = (memory.weights + memory.optimizer + memory.gradients) / total
        assert nbytes - 0.2 < per_parameter <= nbytes + 1e-6


@pytest.mark.parametrize(
    ("zero", "precision", "nbytes"),
    [({}, BF16, 2), ({}, {"fp32": True}, 0), (QWZ, BF16, 1 + 2 / 256)],
    ids=["bf16", "fp32", "qwZ"],
)
def test_offloading_plans_the_pinned_memory_of_both_copies(
    zero: dict, precision: dict, nbytes: float
) -> None:
    """Per element that a rank owns: fp32 weight, two moments, fp32 gradient, and the new weight as sent."""
    settings = {"zero_stage": 3, "zero_offload_optimizer": True} | zero
    job = job_of(ModelConfig(**SHAPE), 500, zero=settings, precision=PrecisionConfig(**precision), local=2)
    owned = sum(layout.shard_numel for layout in job.layouts)
    assert memory_of(job).cpu == pytest.approx((4 + 8 + 4 + nbytes) * owned, abs=1)


def saved_bytes(forward: Callable[[], object], kept: Iterable[torch.Tensor]) -> int:
    """What autograd keeps of the numbers of a forward beside tensors that are `kept` anyway.

    Whole storages, since a view keeps all of its tensor. Ids do not count.
    """
    others = {tensor.untyped_storage().data_ptr() for tensor in kept}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in others:
            found[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in found.values())


def saved_by_a_layer(gpt: GPT) -> int:
    """The same of its first layer, of two samples."""
    tokens = gpt.config.seq_length
    x = torch.randn(2, tokens, gpt.config.hidden_size, requires_grad=True)
    rotation = gpt.rotations(torch.arange(tokens)[None])[0]
    kept = [*gpt.parameters(), *gpt.buffers(), rotation.cos, rotation.sin]
    forward = partial(gpt.layers[0], x, CAUSAL, rotation)
    return saved_bytes(forward, [tensor for tensor in kept if tensor is not None])


PLAIN_LLAMA = LLAMA | {"qk_layernorm": False}
LAYER_NORM = {"normalization": "LayerNorm"}  # an RMSNorm without the compiler keeps more on a CPU


@pytest.mark.parametrize(
    ("variant", "compiled"),
    [
        ({}, False),
        ({"mlp_chunks_for_training": 3}, False),
        (PLAIN_LLAMA | LAYER_NORM, False),
        (LLAMA | LAYER_NORM, False),
        (PLAIN_LLAMA | LAYER_NORM | {"fp32_residual_connection": True}, False),
        nightly(PLAIN_LLAMA, True),
        nightly(LLAMA, True),
    ],
    ids=str,
)
def test_a_layer_saves_what_the_plan_says(variant: dict[str, Any], compiled: bool) -> None:
    """To the byte: rotated queries and keys leave nothing behind of the tensor that values were a view of."""
    if variant.get("group_query_attention") and not GROUPED_FLASH:
        pytest.skip("this torch's attention for CPUs keeps the scores of queries in groups")
    torch._dynamo.reset()
    variant = dict(variant)
    recompute = {"mlp_chunks_for_training": variant.pop("mlp_chunks_for_training", 1)}
    model = ModelConfig(**SHAPE | variant)
    gpt = GPT(model, 100, RecomputeConfig(**recompute)).initialize(3)
    if compiled:
        compile_parts(gpt, (2, model.seq_length), print)
    wide = model.fp32_residual_connection
    gpt.to(torch.bfloat16 if wide else torch.float32)
    found = saved_by_a_layer(gpt)
    precision = PrecisionConfig(bf16=wide, fp32=not wide)
    job = job_of(model, 100, precision=precision, recompute=recompute, micro_batch_size=2)
    # Without a compiler there are copies in fp32 of the weights and biases of two norms.
    copies = wide * 2 * 2 * 4 * model.hidden_size
    assert found == layer_bytes(dataclasses.replace(job, compiled=compiled)) + copies


@pytest.mark.parametrize("variant", [{}, LLAMA | LAYER_NORM], ids=str)
def test_a_layer_with_delayed_scaling_saves_codes(variant: dict[str, Any]) -> None:
    """Three of its inputs are kept as codes alone, and attention's output beside them."""
    if variant.get("group_query_attention") and not GROUPED_FLASH:
        pytest.skip("this torch's attention for CPUs keeps the scores of queries in groups")
    model = ModelConfig(**SHAPE | variant | {"hidden_size": 32, "kv_channels": 16, "num_attention_heads": 4})
    measured, planned = [], []
    for precision in (BF16, BF16 | {"fp8": True, "fp8_recipe": "delayed"}):
        delayed = "fp8" in precision
        matmuls = PLAIN_MATMULS
        if delayed:
            matmuls = DelayedMatmuls(PrecisionConfig(**precision), torch.device("cpu"))
        gpt = build_model(model, 100, matmuls=matmuls).initialize(3)
        if delayed:
            scaling = DelayedScaling(gpt, torch.device("cpu"))
            scaling.end_step(scaling.maxima() + 1, torch.tensor(0.0))
        measured.append(saved_by_a_layer(gpt))
        job = job_of(model, 100, precision=PrecisionConfig(**precision), micro_batch_size=2)
        planned.append(layer_bytes(job))
    inner, rows = model.num_attention_heads * model.kv_channels, 2 * model.seq_length
    codes = rows * (2 * model.hidden_size + inner + model.ffn_hidden_size)
    replaced = (measured[0] - measured[1] + codes) // 4  # fp32 numbers
    assert replaced == rows * (2 * model.hidden_size + model.ffn_hidden_size)
    assert planned[0] - planned[1] == 2 * replaced - codes  # of bf16


FP32 = {"fp32": True}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("zero", [{}, {"zero_stage": 3}, ALL])
def test_squares_come_with_sums_where_the_plan_says_so(zero: dict, micro_batches: int) -> None:
    planned = job_of(ModelConfig(**SHAPE), 300, zero=zero, micro_batches=micro_batches)
    engine = engine_of(planned)
    for index in range(micro_batches):
        engine.accumulate(torch.zeros(1, 129, dtype=torch.long), index=index, micro_batches=micro_batches)
    assert {unit.grad.squares is not None for unit in engine.units} == {planned.returns_squared_norms}


CODES = BF16 | {"fp8": True, "fp8_recipe": "delayed", "fp8_output_layer": True}


@pytest.mark.parametrize(
    ("width", "precision", "chunks", "cap"),
    [
        (256, BF16, 2, None),  # small ones show the memory of a CPU's bf16 products
        (32, FP32, 8, None),
        (256, FP32, 1, None),
        (256, FP32, 1, 30.0),
        *(
            (width, CODES, chunks, cap)
            for width, chunks, cap in ((32, 1, None), (32, 4, 30.0), (64, 2, None))
        ),
    ],
)
def test_the_loss_in_chunks_takes_what_the_plan_says(
    width: int, precision: dict, chunks: int, cap: float | None
) -> None:
    """Within 5%; whether the gradient of the logits is kept or fp32 sums are.

    Of 8-bit products, in chunks and parts; large ones, because a CPU decodes the factors of a product.
    """
    model = ModelConfig(**SHAPE | {"hidden_size": width, "seq_length": 256}, final_logit_softcapping=cap)
    job = job_of(model, 2000, precision=PrecisionConfig(**precision), micro_batch_size=2)
    x, weight = (torch.randn(rows, width).to(job.dtype).requires_grad_() for rows in (512, 2048))
    targets, chunk_bytes, loss = torch.randint(2000, (512,)), 4 * 512 * 2048 // chunks, linear_cross_entropy
    if precision is CODES:
        assert (part_rows(512, width) < 512) == (width == 32)
        product = OutputProduct()
        product.factors, loss = factors_of(torch.full((3,), 64.0)), product.loss
    else:
        assert keeps_gradient(512, width, job.dtype.itemsize) == (width == 256)
    peak = peak_of(lambda: loss(x, weight, targets, Objective(2000, cap), chunk_bytes=chunk_bytes).backward())
    assert loss_bytes(job, chunk_bytes) == pytest.approx(peak, rel=0.05)


MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=1, seq_length=8)


@pytest.mark.parametrize(("zero", "kinds", "on_cpu"), [({}, 3, 3), (FOUR_BITS, 4, 3)])
def test_a_node_copies_what_its_ranks_save(zero: dict, kinds: int, on_cpu: int) -> None:
    """Weights and moments, and the reference of differences; pinned unless the optimizer is on the CPU."""
    job = job_of(MODEL, 1000, zero=zero, nodes=2, local=4)
    shards = [4 * layout.shard_numel for layout in job.layouts]
    assert copies_bytes(job) == 4 * kinds * pinned_bytes(shards)
    assert copies_bytes(dataclasses.replace(job, save_optim=False)) == 4 * pinned_bytes(shards)
    offloaded = dataclasses.replace(job, zero=dataclasses.replace(job.zero, zero_offload_optimizer=True))
    assert copies_bytes(offloaded) == 4 * (on_cpu * sum(shards) + (kinds - on_cpu) * pinned_bytes(shards))


def test_compact_states_are_copied_as_they_are() -> None:
    """Weights as bf16 and a byte; moments as a byte, and one for each block of 128."""
    job = job_of(MODEL, 1000, optimizer=dataclasses.replace(SPLIT, exp_avg_sq_dtype="fp16"))
    shards = [layout.shard_numel for layout in job.layouts]
    sizes = [int(nbytes * numel) for nbytes in (2, 1, 1, 1 / 128, 2, 1 / 128) for numel in shards]
    assert copies_bytes(job) == pinned_bytes(sizes)


def test_pinned_copies_are_powers_of_two() -> None:
    assert pinned_bytes([]) == pinned_bytes([0]) == 0
    assert pinned_bytes([1, 3, 4, 5, 4096, 4097]) == 1 + 4 + 4 + 8 + 4096 + 8192
