"""The launcher's variables and the flat layout: arithmetic that one process can test for many ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.topology import Topology

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_no_launcher_is_one_process() -> None:
    assert Topology.from_environment({}) == Topology(0, 1, 0, 1)


def test_torchruns_variables_are_read() -> None:
    assert Topology.from_environment(TORCHRUN) == Topology(5, 8, 1, 4)


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_variable_is_named(name: str) -> None:
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=rf"^{name} \(not set\)"):
        Topology.from_environment(rest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "8"), ("RANK", "-1"), ("RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "4"), ("RANK", "")],
)
def test_impossible_values_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{'RANK' if name == 'WORLD_SIZE' else name} "):
        Topology.from_environment({**TORCHRUN, name: value})


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.sampled_from([1, 8, 128]))
def test_parameters_never_overlap_and_start_aligned(numels: list[int], alignment: int) -> None:
    layout = FlatLayout(tuple(numels), alignment)
    ends = [offset + numel for offset, numel in zip(layout.offsets, numels, strict=True)]
    assert all(offset % alignment == 0 for offset in layout.offsets)
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.numel
    assert layout.numel < sum(numels) + alignment * len(numels)
