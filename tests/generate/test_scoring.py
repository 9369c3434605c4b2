"""Sliding windows; tests/commands/test_evaluate.py has scores, and whether they are the likeliest."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.generate.scoring import sliding_passages


@given(length=st.integers(0, 200), width=st.integers(1, 40), stride=st.integers(1, 40))
def test_every_id_but_the_first_is_scored_once_in_order(length: int, width: int, stride: int) -> None:
    stride = min(stride, width)
    ids = list(range(length))
    passages = sliding_passages(ids, width, stride)
    scored = [id for passage in passages for id in passage.ids[len(passage.ids) - passage.scored :]]
    assert scored == ids[1:]
    for number, passage in enumerate(passages):
        assert 0 < passage.scored < len(passage.ids) <= width + 1
        assert number == 0 or len(passage.ids) - passage.scored > width - stride
