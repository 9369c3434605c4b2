"""Batch sizes, ramp-up and the division among ranks, compared with a loop over single steps."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_zpp.data.batches import BatchSchedule


def sizes_one_by_one(schedule, samples, consumed=0):
    """Megatron-LM's rule, written as a loop over increments."""
    sizes = []
    while True:
        size = schedule.global_batch_size
        if schedule.rampup:
            start, increment, ramp = schedule.rampup
            increments = (schedule.global_batch_size - start) // increment
            size, passed = start, 0
            while size < schedule.global_batch_size and consumed * increments >= (passed + 1) * ramp:
                size, passed = size + increment, passed + 1
        if consumed + size > samples:
            return sizes
        sizes.append(size)
        consumed += size


@st.composite
def schedules(draw):
    micro, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    unit = micro * ranks
    start = unit * draw(st.integers(1, 4))
    increment = unit * draw(st.integers(1, 3))
    full = start + increment * draw(st.integers(1, 5))
    rampup = draw(st.sampled_from([None, (start, increment, draw(st.integers(1, 600)))]))
    return BatchSchedule(micro, full, ranks, rampup)


@given(schedules(), st.integers(0, 1500), st.sampled_from([0, 1, 7, 60, 500, 1700]))
def test_steps_against_the_loop(schedule, samples, begin):
    """Also from where another batch size left off."""
    sizes = sizes_one_by_one(schedule, samples, begin)
    assert schedule.iterations(samples, consumed=begin) == len(sizes)
    consumed = begin
    for step, size in enumerate(sizes):
        assert schedule.global_batch_size_at(consumed) == size
        assert schedule.samples_after(step, consumed=begin) == consumed
        assert schedule.iterations(consumed, consumed=begin) == step
        consumed += size
    assert schedule.samples_after(len(sizes), consumed=begin) == consumed


@given(schedules(), st.integers(0, 900))
def test_ranks_read_a_step_as_under_megatron_lm(schedule, consumed):
    """Once: one micro-batch of all ranks after the other, as MegatronPretrainingSampler deals samples out."""
    reads = [
        schedule.micro_batch(consumed, index, rank)
        for index in range(schedule.micro_batches_at(consumed))
        for rank in range(schedule.data_parallel_size)
    ]
    read = [first + offset for first, count in reads for offset in range(count)]
    size = schedule.global_batch_size_at(consumed)
    assert read == list(range(consumed, consumed + size))
    assert {count for _, count in reads} == {schedule.micro_batch_size}


def test_long_runs_are_counted_quickly():
    schedule = BatchSchedule(1, 3072, 8, (32, 32, 500_000_000))
    steps = schedule.iterations(10**13)
    assert 10**13 - 3072 < schedule.samples_after(steps) <= 10**13


@given(st.integers(1, 5), st.integers(1, 100), st.integers(1, 5))
def test_indivisible_batches_name_every_factor(micro, size, ranks):
    assume(size % (micro * ranks))
    factors = f"--micro-batch-size {micro} × {ranks} data-parallel ranks = {micro * ranks}"
    said = f"^--global-batch-size {size}: {size} must be a multiple of {factors}"
    with pytest.raises(ValueError, match=said):
        BatchSchedule(micro, size, ranks)


@pytest.mark.parametrize(
    ("rampup", "reason"),
    [
        ((16, 4, 100), "START must be below --global-batch-size 16"),
        ((4, 5, 100), "INCREMENT 5 must divide --global-batch-size 16 - START 4 = 12"),
        ((6, 10, 100), "START 6 must be a multiple of .* 2 × 2 data-parallel ranks = 4, such as 4 or 8"),
        ((4, 6, 100), "INCREMENT 6 must be a multiple"),
        ((4, 4, 0), "must be at least 1"),
    ],
)
def test_impossible_ramps(rampup, reason):
    given = " ".join(map(str, rampup))
    with pytest.raises(ValueError, match=f"^--rampup-batch-size {given}: .*{reason}"):
        BatchSchedule(2, 16, 2, rampup)
