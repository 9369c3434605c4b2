"""benchmarks/unit_sizes.py: its figures are the planner's, the page has them, and they show what it says."""

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.unit_sizes import row_of

FIGURES = json.loads((RESULTS / "unit_sizes.json").read_text())["figures"]
LARGE, SMALL = FIGURES["175b_on_128x8"], FIGURES["6.7b_on_2x8"]


@pytest.mark.parametrize("name", ["hpZ", "hpZ, sublayers", "hpZ, T = 8, sublayers"])
def test_the_result_is_what_the_planner_says(name: str) -> None:
    assert row_of(LARGE[name]["flags"]) == LARGE[name]


def test_blocks_of_a_large_table_need_the_arena_of_a_small_one() -> None:
    name = "256,000 entries, row blocks"
    assert row_of(SMALL[name]["flags"]) == SMALL[name]
    assert "--zero-table-rows" in SMALL[name]["flags"]
    assert SMALL[name]["arena_gib"] <= 1.1 * SMALL["50,257 entries"]["arena_gib"]
    assert SMALL["256,000 entries"]["arena_gib"] > 3 * SMALL["50,257 entries"]["arena_gib"]


def test_hpz_of_175b_fits_80_gigabytes_with_sublayers_alone() -> None:
    assert LARGE["hpZ"]["peak_gb"] > 80
    assert not LARGE["hpZ"]["fits_an_h100"]
    assert LARGE["hpZ, sublayers"]["peak_gb"] < 80
    assert LARGE["hpZ, sublayers"]["fits_an_h100"]
