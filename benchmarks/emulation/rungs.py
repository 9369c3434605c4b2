"""The rungs of the ladder: named settings of what travels between nodes, and the bytes that each costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

Weights = Literal["plain", "bf16", "int8", "delta2", "delta4", "none"]
Gradients = Literal["plain", "bf16", "int4", "int8", "rotated2", "rotated4"]
Small = Literal["plain", "bf16", "coded", "tables"]
Sums = Literal["plain", "rotated4"]
Feedback = float | Literal["momentum"]

# Kinds of parameters, in the order in which they lie in memory; all but the last have weight decay.
ATTENTION, MLP, TABLES, SMALL = "attention", "mlp", "tables", "small"
KINDS = (ATTENTION, MLP, TABLES, SMALL)


class Travel(NamedTuple):
    """The format of gradients, that of their sums, and the feedback of both."""

    gradients: Gradients
    sums: Sums
    feedback: Feedback


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What is sent in which format.

    `weights` and `gradients` are those of matrices inside layers: `plain` is the format of the compute and an
    fp32 sum. `table_weights` and `table_gradients` are those of tables. `small`: norms and biases, whose
    gradients travel likewise; `coded` is as matrices, in the same message, and `tables` is as tables. `hop1`:
    gradients inside a node.

    With weights `none` the states of matrices are sharded inside nodes and replicated between them: every
    node changes all matrices alike. Owners of summed gradients send the sums on in the format `sums`, and no
    weights cross.

    `gradient_feedback`: the share of what codes lost of a matrix's gradients, and of sums, that is added to
    what the next step sends; 1 is error feedback. "momentum" is the share that the optimizer's momentum
    keeps: then it lacks exactly what the last codes lost, times the share that it takes of a gradient.

    `nudged`: nothing differs but the first weight, which begins a unit in the last place of bf16 larger.
    """

    weights: Weights = "plain"
    gradients: Gradients = "plain"
    table_weights: Weights = "plain"
    table_gradients: Gradients = "plain"
    small: Small = "bf16"
    sums: Sums = "plain"
    hop1: Literal["plain", "int4", "int8"] = "plain"
    hop1_block: int = 128
    weight_block: int = 256
    gradient_block: int = 256
    gradient_feedback: Feedback = 0.0
    nudged: bool = False

    def __post_init__(self) -> None:
        for weights in (self.weights, self.table_weights):
            if weights not in get_args(Weights):
                raise ValueError(f"weights must be one of {get_args(Weights)}, got {weights}")
        for gradients in (self.gradients, self.table_gradients):
            if gradients not in get_args(Gradients):
                raise ValueError(f"gradients must be one of {get_args(Gradients)}, got {gradients}")
        if "none" in (self.weights_of(TABLES), self.weights_of(SMALL)):
            raise ValueError("weights none: AdamW's tables, norms and biases have states of their own")
        if self.sums != "plain" and self.weights != "none":
            raise ValueError(f"sums {self.sums} need weights none, got {self.weights}")

    def weights_of(self, kind: str) -> Weights:
        """The format of the weights of a kind of parameters."""
        if kind == SMALL and self.small in ("plain", "bf16"):
            return self.small
        return self.table_weights if self._is_table(kind) else self.weights

    def gradients_of(self, kind: str) -> Gradients:
        """The same of gradients."""
        if kind == SMALL and self.small in ("plain", "bf16"):
            return self.small
        return self.table_gradients if self._is_table(kind) else self.gradients

    def travel_of(self, kind: str) -> "Travel":
        """How the gradients of a kind become sums."""
        if kind in (ATTENTION, MLP):
            return Travel(self.gradients, self.sums, self.gradient_feedback)
        return Travel(self.gradients_of(kind), "plain", 0.0)

    def _is_table(self, kind: str) -> bool:
        return kind == TABLES or (kind == SMALL and self.small == "tables")

    @property
    def largest_block(self) -> int:
        """Elements of the largest block; parameters begin at its multiples."""
        return max(self.weight_block, self.gradient_block, self.hop1_block, 256)

    def bytes_per_parameter(self, numels: Mapping[str, int]) -> float:
        """Between nodes per step, with one crossing per step: sent by all nodes / parameters / (nodes - 1).

        `numels`: parameters by kind. Plain weights count 2 bytes and plain gradients 4.
        """
        total = 0.0
        for kind, numel in numels.items():
            if self.weights_of(kind) == "none":
                sent = _bytes(self.sums, 4, self.gradient_block)
            else:
                sent = _bytes(self.weights_of(kind), 2, self.weight_block)
            sent += _bytes(self.gradients_of(kind), 4, self.gradient_block)
            total += numel * sent
        return total / sum(numels.values())


def _bytes(format: str, plain: int, block: int) -> float:
    if format == "plain":
        return plain
    if format == "bf16":
        return 2
    return int(format[-1]) / 8 + 2 / block


TODAY = Rung(
    weights="int8",
    gradients="int4",
    table_weights="int8",
    table_gradients="int4",
    small="coded",
    hop1="int4",
    gradient_block=128,
)
DELTA4 = Rung(weights="delta4")
ROTATED4, ROTATED2 = Rung(gradients="rotated4"), Rung(gradients="rotated2")
BOTH4 = replace(DELTA4, gradients="rotated4")


def _everywhere(weights: Weights, gradients: Gradients, hop1: Literal["plain", "int4", "int8"]) -> Rung:
    """The same formats for matrices, tables, norms and biases, in one message."""
    return Rung(
        weights=weights,
        gradients=gradients,
        table_weights=weights,
        table_gradients=gradients,
        small="coded",
        hop1=hop1,
    )


FOUR = _everywhere("delta4", "rotated4", "int8")
MUON4 = replace(FOUR, small="tables")
SUMS4 = replace(MUON4, weights="none", sums="rotated4")
FEEDBACKS: dict[str, Feedback] = {"": 0.0, " feedback": 1.0, " feedback of the momentum": "momentum"}

BASELINE = "baseline"
RUNGS: dict[str, Rung] = {
    BASELINE: Rung(small="plain"),
    "baseline, again": Rung(small="plain", weight_block=128),  # must end with the bits of the baseline
    "baseline, nudged": Rung(small="plain", nudged=True),  # what the least difference does to a run
    "today": TODAY,
    "int8 weights": Rung(weights="int8"),
    "int4 gradients": Rung(gradients="int4", gradient_block=128),
    "delta4": DELTA4,
    "rotated4": ROTATED4,
    "delta4 rotated4": BOTH4,
    "delta4 rotated4 tables4": replace(BOTH4, table_weights="delta4", table_gradients="rotated4"),
    "four bits everywhere": replace(FOUR, hop1="plain"),
    "four bits everywhere behind int8": FOUR,
    "four bits everywhere behind int4": replace(FOUR, hop1="int4"),
    # fewer bits
    "delta2": Rung(weights="delta2"),
    "rotated2": ROTATED2,
    "delta2 rotated2": replace(ROTATED2, weights="delta2"),
    # error feedback of gradients
    "rotated2 feedback": replace(ROTATED2, gradient_feedback=1.0),
    "rotated4 feedback": replace(ROTATED4, gradient_feedback=1.0),
    "int4 gradients feedback": Rung(gradients="int4", gradient_block=128, gradient_feedback=1.0),
    # matrices under Muon; everything else is AdamW's, in four bits
    **{f"sums4{name}": replace(SUMS4, gradient_feedback=share) for name, share in FEEDBACKS.items()},
    **{f"four bits{name}": replace(MUON4, gradient_feedback=share) for name, share in FEEDBACKS.items()},
    "four bits, int8 gradients": replace(MUON4, gradients="int8"),
    "sums4, int8 gradients": replace(SUMS4, gradients="int8"),
}

# Each question in one command: --ladder NAME.
LADDERS: dict[str, tuple[str, ...]] = {
    "first": ("today", "delta4", "rotated4", "delta4 rotated4", "delta2", "rotated2"),
    "everywhere": tuple(name for name in RUNGS if "everywhere" in name),
    "feedback": tuple(name for name in RUNGS if name.endswith("feedback")),
    "muon": ("baseline, nudged", *(f"{name}{kind}" for kind in FEEDBACKS for name in ("sums4", "four bits"))),
    "all": tuple(name for name in RUNGS if not name.startswith(BASELINE)),
}

# By name, the fields of IslandSettings that differ from the tuned ones.
ISLANDS: dict[str, dict[str, float]] = {
    "2 islands": {},
    "2 islands, H = 10": {"interval": 10},
    "2 islands, H = 100": {"interval": 100},
    "2 islands, 4 bits": {"bits": 4},
    "2 islands, 2 bits": {"bits": 2},
    "2 islands, overlap 0.5": {"overlap": 0.5},
    "2 islands, overlap 1": {"overlap": 1.0},
    "2 islands, 4 bits, overlap 0.5": {"bits": 4, "overlap": 0.5},
    "4 islands": {"count": 4},
    "4 islands, 4 bits, overlap 0.5": {"count": 4, "bits": 4, "overlap": 0.5},
    "1 island": {"count": 1},
}
LADDERS["islands"] = tuple(ISLANDS)
GATE_PAIRS = 8  # of which islands need at least so many to pass
