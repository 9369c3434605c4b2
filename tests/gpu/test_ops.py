"""The CUDA kernels where tests/ops cannot compare them: on many elements, on streams, on two devices."""

import pytest
import torch

from megatron_zpp.ops import reference, reference_compact, state_codes
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.library import load_kernels, load_operations
from megatron_zpp.ops.operations import Operations
from tests.ops import cases
from tests.ops.agreement import assert_agree, assert_same_bits
from tests.ops.awkward import awkward, random_messages
from tests.ops.test_lloyd_max_kernels import SIGNS

BEYOND = 2**31 + 2**20  # elements that an int32 cannot count


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Load the CUDA kernels as torch.ops.megatron_zpp."""
    load_kernels("cuda", print)


def needs(gigabytes: int) -> None:
    """Skip the test if the GPU has less free memory."""
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of GPU memory")


@pytest.mark.parametrize(
    "format", [QuantFormat("int4", 128), QuantFormat("int8", 32), QuantFormat("int8", 2048)]
)
def test_sums_of_more_than_the_warps_hold_at_once(format: QuantFormat) -> None:
    """Every warp sums several tiles and prefetches the next; the last tile has few blocks."""
    generator = torch.Generator("cuda").manual_seed(1)
    m = format.block * (2**26 // format.block + 1)
    x = torch.randn(3, m, generator=generator, device="cuda")
    messages = torch.empty(3, format.message_bytes(m), dtype=torch.uint8, device="cuda")
    torch.ops.megatron_zpp.quantize(x, messages, *cases.plain(format))
    shards = [x[1].clone(), x[1].clone()]
    outputs = [torch.zeros(1, format.message_bytes(m), dtype=torch.uint8, device="cuda") for _ in range(2)]
    for operations, shard, output in zip((torch.ops.megatron_zpp, reference), shards, outputs, strict=True):
        operations.sum_into(messages, shard, *cases.plain(format), True)
        operations.sum_quantize(messages, output, *cases.plain(format))
    assert torch.equal(*shards)
    assert torch.equal(*outputs)


def test_lloyd_max_codes_of_more_blocks_than_the_warps_hold_at_once() -> None:
    """What was sent is near what was meant."""
    ops = load_operations("cuda", require_kernels=True, say=print)
    format, m = LloydMaxFormat(4, 256), 256 * (2**17 + 3)
    x = torch.randn(2, m, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    messages = torch.empty(2, format.message_bytes(m), dtype=torch.uint8, device="cuda")
    for row, message in zip(x, messages, strict=True):
        ops.quantize_rotated(row, message[None], format, SIGNS)
    total = torch.empty(m, device="cuda")
    ops.sum_rotated(messages, total, format, SIGNS)
    assert ((total - x.sum(0)).square().mean() / x.sum(0).square().mean()).sqrt() < 0.12
    lost, divisor = torch.zeros(1, m, dtype=torch.bfloat16, device="cuda"), torch.tensor(2.0, device="cuda")
    ops.quantize_rotated(x[0], messages[:1], format, SIGNS, lost=lost, divisor=divisor)
    ops.sum_rotated(messages[:1], total, format, SIGNS)
    missing = x[0] - total
    assert (missing - 2 * lost[0]).norm() < 2**-8 * missing.norm()
    reference = x[0] + 1e-3 * x[1]
    before = (x[0] - reference).norm()
    ops.quantize_difference(x[0], reference, messages[0], format)
    ops.add_difference(messages[:1], reference, format)
    assert (x[0] - reference).norm() < 0.11 * before


@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_the_reference_gives_the_same_bits_on_a_gpu(code_type: str) -> None:
    """The reference is the substitute on GPUs, too, if nothing can be compiled."""
    format = QuantFormat(code_type, 64)
    x = awkward(4, 64 * 40, 64, torch.bfloat16)
    messages = cases.garbage(2, format.message_bytes(64 * 80))
    args = cases.plain(format)
    assert_agree("quantize", x, messages, *args, device="cuda", oracle_device="cuda")
    on_cpu, on_gpu = messages.clone(), messages.cuda()
    reference.quantize(x, on_cpu, *args)
    reference.quantize(x.cuda(), on_gpu, *args)
    assert_same_bits(on_gpu.cpu(), on_cpu)
    states = cases.adamw_states(5000)
    on_gpu = [state.cuda() for state in states]
    reference.adamw(*states, None, *cases.adamw_scalars().packed(), 1000)
    reference.adamw(*on_gpu, None, *cases.adamw_scalars(device="cuda").packed(), 1000)
    for mine, theirs in zip(on_gpu, states, strict=True):
        assert_same_bits(mine.cpu(), theirs)


def test_operators_run_on_the_current_stream_without_waiting() -> None:
    """Work that is queued after a sleeping kernel on another stream has not run when the call returns."""
    format = QuantFormat()
    x, messages = torch.randn(4, 256, device="cuda"), torch.zeros(4, 272, dtype=torch.uint8, device="cuda")
    shard, states = torch.zeros(256, device="cuda"), [state.cuda() for state in cases.adamw_states(256)]
    scalars = cases.adamw_scalars(device="cuda").packed()
    moments = [each for _ in range(2) for each in state_codes.zeros(256, "fp8", shard.device)]
    rounding = state_codes.Rounding(torch.ones((), device="cuda"), 0).packed()
    stream = torch.cuda.Stream()

    def call_all() -> None:
        torch.ops.megatron_zpp.quantize(x, messages, *cases.plain(format))
        torch.ops.megatron_zpp.sum_into(messages, shard, *cases.plain(format), False)
        torch.ops.megatron_zpp.adamw(*states, None, *scalars, 100)
        torch.ops.megatron_zpp.adamw_compact(*states[:2], *moments, None, *scalars, 100, *rounding)

    call_all()  # CUDA synchronises when it loads a kernel, at its first launch
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            call_all()
            done = stream.record_event()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert shard.abs().sum() > 0


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="sum_parts: shard must be on the device of parts, cuda:0, got cpu"):
        torch.ops.megatron_zpp.sum_parts(torch.ones(2, 8, device="cuda"), torch.ones(8), False)


def test_more_elements_than_an_int32_counts() -> None:
    """Quantise and decode more than 2^31 elements, with the kernels and with the reference."""
    needs(24)
    format = QuantFormat("int4", 256)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, BEYOND // 2, generator=generator, device="cuda", dtype=torch.bfloat16)
    mine = torch.empty(1, format.message_bytes(BEYOND), dtype=torch.uint8, device="cuda")
    theirs = torch.empty_like(mine)
    torch.ops.megatron_zpp.quantize(x, mine, *cases.plain(format))
    reference.quantize(x, theirs, *cases.plain(format))
    assert torch.equal(mine, theirs)
    back = torch.empty_like(x)
    torch.ops.megatron_zpp.dequantize(mine, back, *cases.plain(format))
    reference.dequantize(theirs, x, *cases.plain(format))
    assert torch.equal(back, x)


def test_sums_of_more_elements_than_an_int32_counts() -> None:
    needs(24)
    format = QuantFormat("int4", 256)
    small = random_messages(1, format, 2**20, seed=3).cuda()
    small[0, -(2**13) :] = torch.full((2**12,), 0.5, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
    messages = torch.empty(1, format.message_bytes(BEYOND), dtype=torch.uint8, device="cuda")
    messages[0, : BEYOND // 2] = small[0, : 2**19].repeat(BEYOND // 2**20)
    messages[0, BEYOND // 2 :] = small[0, 2**19 :].repeat(BEYOND // 2**20)
    mine = torch.empty(1, format.message_bytes(BEYOND), dtype=torch.uint8, device="cuda")
    theirs = torch.empty_like(mine)
    args = cases.plain(format)
    torch.ops.megatron_zpp.sum_quantize(messages, mine, *args)
    reference.sum_quantize(messages, theirs, *args)
    assert torch.equal(mine, theirs)
    del mine, theirs
    shard, expected = torch.empty(BEYOND, device="cuda"), torch.empty(2**20, device="cuda")
    torch.ops.megatron_zpp.sum_into(messages, shard, *cases.plain(format), False)
    reference.sum_into(small, expected, *cases.plain(format), False)
    assert torch.equal(shard.view(-1, 2**20), expected.expand(BEYOND // 2**20, -1))


def test_a_compact_step_on_more_elements_than_an_int32_counts() -> None:
    """The last elements, beyond index 2^31, equal those of a step on them alone."""
    needs(24)
    last, scalars = 128 * 1001, cases.adamw_scalars(device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    gradient = torch.randn(BEYOND, generator=generator, device="cuda", dtype=torch.bfloat16)
    states = [
        *(torch.randint(256, (BEYOND,), generator=generator, device="cuda", dtype=torch.uint8), gradient),
        *state_codes.zeros(BEYOND, "fp8", gradient.device),
        *state_codes.zeros(BEYOND, "fp8", gradient.device),
        torch.randn(BEYOND, generator=generator, device="cuda", dtype=torch.bfloat16),
    ]
    alone = [state[-(last if len(state) == BEYOND else last // 128) :].clone() for state in states]
    step = torch.ones((), device="cuda")
    ops = Operations(torch.ops.megatron_zpp, compiled=True)
    ops.adamw_compact(*states, scalars, state_codes.Rounding(step, 1), decayed=BEYOND)
    rounding = state_codes.Rounding(step, 1, BEYOND - last)
    reference_compact.adamw_compact(*alone, *scalars.packed(), last, *rounding.packed())
    for state, tail in zip(states, alone, strict=True):
        assert_same_bits(state[-len(tail) :], tail)


def test_a_step_on_more_elements_than_an_int32_counts() -> None:
    """The last elements, beyond index 2^31, equal those of a step on them alone."""
    needs(50)
    last, scalars = 2**20 + 3, cases.adamw_scalars(device="cuda").packed()
    alone = [torch.nan_to_num(state).cuda() for state in cases.adamw_states(last)]
    states = [torch.ones(BEYOND + 3, device="cuda") for _ in alone]
    for state, tail in zip(states, alone, strict=True):
        state[-last:] = tail
    gather_source = torch.zeros(BEYOND + 3, dtype=torch.bfloat16, device="cuda")
    torch.ops.megatron_zpp.adamw(*states, gather_source, *scalars, BEYOND)
    reference.adamw(*alone, None, *scalars, last - 3)
    for state, tail in zip(states, alone, strict=True):
        assert_same_bits(state[-last:], tail)
    assert torch.equal(gather_source, states[0].bfloat16())
