"""What a run says of itself to those who watch it."""

from pathlib import Path

from megatron_zpp.supervision.activity import Activity
from tests.train.in_process import train_here


class Heard(Activity):
    """Every mark by its words: whether it may take unlimited time."""

    def __init__(self) -> None:
        super().__init__()
        self.patient: dict[str, bool] = {}

    def now(self, text: str, *, patient: bool = False, limit: float | None = None) -> None:
        super().now(text, patient=patient, limit=limit)
        self.patient[text] = patient


def marks_of(argv: list[str]) -> dict[str, bool]:
    heard = Heard()
    train_here(argv, heard)
    return heard.patient


def test_the_first_evaluation_of_a_resumed_run_may_build_its_kernels(
    flags: list[str], tmp_path: Path
) -> None:
    """The compiler builds the graph without gradients then, after quick steps."""
    saved = ["--save", str(tmp_path), "--load", str(tmp_path), "--eval-iters", "8"]
    run = [*flags, *saved, "--train-iters", "4", "--eval-interval", "2"]
    marks_of([*run, "--exit-interval", "1"])
    marks = marks_of(run)
    parts = ["reading micro-batch 1 of 1", "micro-batch 1 of 1", "optimizer", "report"]
    assert [marks[f"step 4, {part}"] for part in parts] == [False] * 4
    assert not marks["step 3, micro-batch 1 of 1"]
    assert marks["evaluation of valid at iteration 2, round 1 of 8"]
    assert not marks["evaluation of valid at iteration 2, round 2 of 8"]
    assert not marks["evaluation of valid at iteration 4, round 1 of 8"]
