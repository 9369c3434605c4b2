"""The rungs of the ladder: named settings of what travels between nodes, and the bytes that each costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Weights = Literal["plain", "bf16", "int8", "int4", "delta2", "delta3", "delta4", "delta8"]
Gradients = Literal["plain", "bf16", "int4", "int8", "rotated2", "rotated3", "rotated4"]
Small = Literal["plain", "bf16", "coded"]
OUTLIER_BYTES = 2 + 1  # a bf16 value and its place in a block of 256

# Kinds of parameters, in the order in which they lie in memory; all but the last have weight decay.
ATTENTION, MLP, TABLES, SMALL = "attention", "mlp", "tables", "small"
KINDS = (ATTENTION, MLP, TABLES, SMALL)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What is sent in which format.

    `weights` and `gradients` are those of matrices inside layers: `plain` is the format of the compute and an
    fp32 sum; `delta8` codes a difference by the engine's int8. `attention_weights`, `table_weights` and
    `table_gradients` differ from them where they are given. `early_weights` replaces the formats of `delta…`
    weights until twice the warm-up. `small`: norms and biases, whose gradients travel likewise; `coded` is as
    matrices, in the same message. `hop1`: gradients inside a node. `reference`: the precision of R.
    Without `weight_feedback` the change of a step is coded instead of what the reference lacks.
    `least_squares`: the scale of rotated codes with the least error in place of the nearly unbiased one.
    `nudged`: nothing differs but the first weight, which begins a unit in the last place of bf16 larger.
    """

    weights: Weights = "plain"
    gradients: Gradients = "plain"
    attention_weights: Weights | None = None
    table_weights: Weights = "plain"
    table_gradients: Gradients = "plain"
    small: Small = "bf16"
    hop1: Literal["plain", "int4", "int8"] = "plain"
    hop1_block: int = 128
    weight_block: int = 256
    gradient_block: int = 256
    early_weights: Weights | None = None
    weight_outliers: int = 0  # per block, sent exactly
    gradient_outliers: int = 0
    reference: Literal["fp32", "bf16"] = "fp32"
    weight_feedback: bool = True
    gradient_feedback: bool = False
    least_squares: bool = False
    signs_per_node: bool = False
    nudged: bool = False

    def __post_init__(self) -> None:
        for weights in (self.weights, self.attention_weights, self.table_weights, self.early_weights):
            if weights is not None and weights not in get_args(Weights):
                raise ValueError(f"weights must be one of {get_args(Weights)}, got {weights}")
        for gradients in (self.gradients, self.table_gradients):
            if gradients not in get_args(Gradients):
                raise ValueError(f"gradients must be one of {get_args(Gradients)}, got {gradients}")

    def weights_of(self, kind: str) -> Weights:
        """The format of the weights of a kind of parameters."""
        if kind == SMALL:
            return self.weights if self.small == "coded" else self.small
        if kind == TABLES:
            return self.table_weights
        return self.attention_weights or self.weights if kind == ATTENTION else self.weights

    def gradients_of(self, kind: str) -> Gradients:
        """The same of gradients."""
        if kind == SMALL:
            return self.gradients if self.small == "coded" else self.small
        return self.table_gradients if kind == TABLES else self.gradients

    @property
    def largest_block(self) -> int:
        """Elements of the largest block; parameters begin at its multiples."""
        return max(self.weight_block, self.gradient_block, self.hop1_block, 256)

    @property
    def varies_rotation(self) -> bool:
        """Whether rotated gradients have something that the engine does not have."""
        return bool(
            self.gradient_outliers or self.gradient_feedback or self.least_squares or self.signs_per_node
        )

    @property
    def varies_differences(self) -> bool:
        """The same of weight differences."""
        return bool(self.weight_outliers) or not self.weight_feedback or self.reference != "fp32"

    def bytes_per_parameter(self, numels: Mapping[str, int]) -> float:
        """Between nodes per step, with one crossing per step: sent by all nodes / parameters / (nodes - 1).

        `numels`: parameters by kind. Plain weights count 2 bytes and plain gradients 4.
        """
        total = 0.0
        for kind, numel in numels.items():
            sent = _bytes(self.weights_of(kind), 2, self.weight_block, self.weight_outliers)
            sent += _bytes(self.gradients_of(kind), 4, self.gradient_block, self.gradient_outliers)
            total += numel * sent
        return total / sum(numels.values())


def _bytes(format: str, plain: int, block: int, outliers: int) -> float:
    if format == "plain":
        return plain
    if format == "bf16":
        return 2
    exact = outliers * OUTLIER_BYTES if format.startswith(("delta", "rotated")) else 0
    return int(format[-1]) / 8 + (2 + exact) / block


TODAY = Rung(
    weights="int8",
    gradients="int4",
    table_weights="int8",
    table_gradients="int4",
    small="coded",
    hop1="int4",
    gradient_block=128,
)
DELTA4, DELTA3, DELTA2 = Rung(weights="delta4"), Rung(weights="delta3"), Rung(weights="delta2")
ROTATED4, ROTATED3 = Rung(gradients="rotated4"), Rung(gradients="rotated3")
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


FOUR, THREE = _everywhere("delta4", "rotated4", "int8"), _everywhere("delta3", "rotated3", "int8")
THREE_TABLES4 = replace(THREE, table_weights="delta4", table_gradients="rotated4")

BASELINE = "baseline"
RUNGS: dict[str, Rung] = {
    BASELINE: Rung(small="plain"),
    "baseline, again": Rung(small="plain", weight_block=128),  # must end with the bits of the baseline
    "baseline, nudged": Rung(small="plain", nudged=True),  # what the least difference does to a run
    "16-bit norms": Rung(),
    "today": TODAY,
    "today, tables exact": replace(TODAY, table_weights="plain", table_gradients="plain"),
    "int8 weights": Rung(weights="int8"),
    "int4 gradients": Rung(gradients="int4", gradient_block=128),
    # (a) to (c)
    "delta4": DELTA4,
    "rotated4": ROTATED4,
    "delta4 rotated4": BOTH4,
    "four bits everywhere": replace(FOUR, hop1="plain"),
    "four bits everywhere behind int8": FOUR,
    "four bits everywhere behind int4": replace(FOUR, hop1="int4"),
    "four bits everywhere behind int8 reference16": replace(FOUR, reference="bf16"),
    "three bits everywhere behind int8": THREE,
    "three bits everywhere early4": replace(THREE, early_weights="delta4"),
    "two and three bits everywhere early4": replace(
        THREE, weights="delta2", table_weights="delta2", early_weights="delta4"
    ),
    "three bits, tables of four": THREE_TABLES4,
    "three bits, tables of four, early4": replace(THREE_TABLES4, early_weights="delta4"),
    "two and three bits, tables of four, early4": replace(
        THREE_TABLES4, weights="delta2", early_weights="delta4"
    ),
    # (d) fewer bits of weights, by kind and by phase
    "delta3": DELTA3,
    "delta2": DELTA2,
    "delta2 early4": replace(DELTA2, early_weights="delta4"),
    "delta3 early4": replace(DELTA3, early_weights="delta4"),
    "delta2 attention4": replace(DELTA2, attention_weights="delta4"),
    "delta4 attention2": replace(DELTA4, attention_weights="delta2"),
    # (e) fewer bits of gradients
    "rotated3": ROTATED3,
    "delta4 rotated3": replace(DELTA4, gradients="rotated3"),
    "delta3 rotated3": replace(DELTA3, gradients="rotated3"),
    "delta2 rotated3": replace(DELTA2, gradients="rotated3"),
    "delta2 early4 rotated3": replace(DELTA2, early_weights="delta4", gradients="rotated3"),
    "rotated3 signs per node": replace(ROTATED3, signs_per_node=True),
    "rotated4 signs per node": replace(ROTATED4, signs_per_node=True),
    "rotated4 behind int8": replace(ROTATED4, hop1="int8"),
    "rotated4 behind int4": replace(ROTATED4, hop1="int4"),
    "rotated3 behind int8": replace(ROTATED3, hop1="int8"),
    "delta4 rotated4 behind int8": replace(BOTH4, hop1="int8"),
    # (f) outliers and blocks
    "delta2 outliers1": replace(DELTA2, weight_outliers=1),
    "delta2 outliers4": replace(DELTA2, weight_outliers=4),
    "rotated3 outliers2": replace(ROTATED3, gradient_outliers=2),
    **{f"delta2 block{block}": replace(DELTA2, weight_block=block) for block in (128, 512, 1024, 2048)},
    **{f"delta4 block{block}": replace(DELTA4, weight_block=block) for block in (128, 1024, 2048)},
    **{f"rotated3 block{block}": replace(ROTATED3, gradient_block=block) for block in (128, 1024, 2048)},
    **{f"rotated4 block{block}": replace(ROTATED4, gradient_block=block) for block in (128, 1024, 2048)},
    # (g) the reference in bf16
    "delta4 reference16": replace(DELTA4, reference="bf16"),
    "delta2 reference16": replace(DELTA2, reference="bf16"),
    "delta4 rotated4 reference16": replace(BOTH4, reference="bf16"),
    # (h) tables
    "delta4 rotated4 tables8": replace(BOTH4, table_weights="delta8", table_gradients="int8"),
    "delta4 rotated4 tables4": replace(BOTH4, table_weights="delta4", table_gradients="rotated4"),
    "delta4 rotated4 tables84": replace(BOTH4, table_weights="delta8", table_gradients="rotated4"),
    "delta4 tables4": replace(DELTA4, table_weights="delta4"),
    "rotated4 tables4": replace(ROTATED4, table_gradients="rotated4"),
    # (i) feedback
    "delta4 without feedback": replace(DELTA4, weight_feedback=False),
    "rotated3 feedback": replace(ROTATED3, gradient_feedback=True),
    "rotated3 feedback least squares": replace(ROTATED3, gradient_feedback=True, least_squares=True),
    "rotated3 least squares": replace(ROTATED3, least_squares=True),
    "rotated4 feedback": replace(ROTATED4, gradient_feedback=True),
    "rotated4 feedback least squares": replace(ROTATED4, gradient_feedback=True, least_squares=True),
    "int4 gradients feedback": Rung(gradients="int4", gradient_block=128, gradient_feedback=True),
}

# Each question of the issue in one command: --ladder NAME.
LADDERS: dict[str, tuple[str, ...]] = {
    "first": ("today", "delta4", "rotated4", "delta4 rotated4", "delta2", "rotated3"),
    "weights": ("delta4", "delta3", "delta2", "delta2 early4", "delta2 attention4", "delta4 attention2"),
    "everywhere": tuple(name for name in RUNGS if "everywhere" in name),
    "gradients": ("rotated4", "rotated3", "rotated3 signs per node", "rotated4 behind int8"),
    "together": ("delta4 rotated4", "delta4 rotated3", "delta3 rotated3", "delta2 early4 rotated3"),
    "blocks": tuple(name for name in RUNGS if "block" in name or "outliers" in name),
    "reference": tuple(name for name in RUNGS if "reference16" in name),
    "tables": tuple(name for name in RUNGS if "tables" in name),
    "feedback": tuple(name for name in RUNGS if "feedback" in name or "least squares" in name),
    "all": tuple(name for name in RUNGS if not name.startswith(BASELINE)),
}
