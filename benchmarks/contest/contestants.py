"""The contestants: each one's program and arguments on a grid of nodes × ranks."""

import importlib.util
from dataclasses import dataclass
from typing import Any

_ZEROPP = {
    "zero_stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": "auto",
    "zero_quantized_gradients": True,
}
_4_BITS = {
    **_ZEROPP,
    "zero_quantized_weights_format": "delta4",
    "zero_quantized_gradients_format": "rotated4",
}
OURS: dict[str, dict[str, Any]] = {  # settings of ZeroConfig
    "stage_0": {"zero_stage": 0},
    "stage_1": {"zero_stage": 1},
    "stage_2": {"zero_stage": 2},
    "stage_3": {"zero_stage": 3},
    "stage_3_prefetch_2": {"zero_stage": 3, "zero_prefetch_units": 2},
    "qwz": {"zero_stage": 3, "zero_quantized_weights": True},
    "hpz": {"zero_stage": 3, "zero_hpz_partition_size": "auto"},
    "qgz": {"zero_stage": 3, "zero_quantized_gradients": True},
    "zeropp": _ZEROPP,
    "zeropp_4_bits": _4_BITS,
    # Accumulates inside each node, so that nothing between nodes grows with the number of micro-batches.
    "zeropp_4_bits_once": {**_4_BITS, "zero_gradient_partition_size": "auto"},
    # Accumulates inside each rank, so that nothing between nodes grows with the number of micro-batches.
    "stage_1_qwz_qgz": {"zero_stage": 1, "zero_quantized_weights": True, "zero_quantized_gradients": True},
}
_WITH_MUON = ("--optimizer", "muon")
DEEPSPEED_ABSENT = "deepspeed cannot be imported; benchmarks/README.md says how to install it"


@dataclass(frozen=True)
class Contestant:
    """One row of a table; `family` is ours, fsdp2 or deepspeed."""

    family: str
    title: str
    module: str
    arguments: tuple[str, ...]

    def absent(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        if self.family == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            return DEEPSPEED_ABSENT
        return None


def contestants(nodes: int, ranks_per_node: int, micro_batches: int) -> dict[str, Contestant]:
    """All contestants that make sense on this grid, by name."""
    found = {
        "one_gpu": _ours("stage_0", "ours, each GPU alone", "--alone"),
        "one_gpu_muon": _ours("stage_0", "ours, each GPU alone, Muon", "--alone", *_WITH_MUON),
    }
    if nodes * ranks_per_node > 1:
        found |= {name: _ours(name, f"ours, {name.replace('_', ' ')}") for name in OURS}
        with_muon = {"muon": "stage_3", "muon_stage_1": "stage_1", "muon_4_bits": "zeropp_4_bits"}
        if micro_batches > 1:
            with_muon["muon_4_bits_once"] = "zeropp_4_bits_once"
        for name, settings in with_muon.items():
            found[name] = _ours(settings, f"ours, {settings.replace('_', ' ')}, Muon", *_WITH_MUON)
    return found | _fsdp2(nodes, ranks_per_node, micro_batches) | _deepspeed(nodes, ranks_per_node)


def default_names(nodes: int, ranks_per_node: int, micro_batches: int) -> list[str]:
    """The contestants of this grid's default table, which has no Muon."""
    every = contestants(nodes, ranks_per_node, micro_batches)
    if nodes == 1:
        ours = ["one_gpu", "stage_0", "stage_1", "stage_2", "stage_3", "stage_3_prefetch_2", "zeropp"]
    else:
        ours = "one_gpu stage_1 stage_3 qwz hpz qgz zeropp zeropp_4_bits stage_1_qwz_qgz".split()
        ours += ["zeropp_4_bits_once"] * (micro_batches > 1)
    peers = [name for name, contestant in every.items() if contestant.family != "ours" and "muon" not in name]
    return [name for name in ours if name in every] + peers


def _ours(settings: str, title: str, *more: str) -> Contestant:
    arguments = ("--settings", settings, *more)
    return Contestant("ours", title, "benchmarks.contest.train_ours", arguments)


def _fsdp2(nodes: int, ranks_per_node: int, micro_batches: int) -> dict[str, Contestant]:
    """FSDP2 with 16- and 32-bit reduction, resharding that suits the grid, and HSDP.

    On nodes of several ranks weights are resharded to the node, so that the backward gathers inside it; on
    nodes of one rank they stay whole. Beside these there is FSDP2's default, which reshards to all ranks.
    """
    best = str(ranks_per_node) if nodes > 1 and ranks_per_node > 1 else "false"
    found = {}
    for reduce in ("bf16", "fp32"):
        words = f"FSDP2, {reduce} reduction"
        common = ("--reduce", reduce, "--nodes", str(nodes))
        layouts: dict[str, tuple[str, tuple[str, ...]]] = {
            "": (words, ("--reshard", best)),
            "_reshard": (f"{words}, resharded to all ranks", ("--reshard", "true")),
        }
        once = ("--layout", "once", "--reshard", "false")
        if micro_batches > 1:
            layouts["_once"] = (f"{words}, gradients sent once per step", once)
        if nodes > 1:
            inside = "true" if ranks_per_node > 1 else "false"
            layouts["_hsdp"] = (f"{words}, HSDP", ("--layout", "hsdp", "--reshard", inside))
        layouts["_muon"] = (f"{words}, Muon", ("--reshard", best, *_WITH_MUON))
        if micro_batches > 1:
            layouts["_once_muon"] = (f"{words}, Muon, gradients sent once per step", (*once, *_WITH_MUON))
        for suffix, (title, arguments) in layouts.items():
            contestant = Contestant("fsdp2", title, "benchmarks.contest.train_fsdp2", (*common, *arguments))
            found[f"fsdp2_{reduce}{suffix}"] = contestant
    return found


def _deepspeed(nodes: int, ranks_per_node: int) -> dict[str, Contestant]:
    """ZeRO-3 and ZeRO++, with weights gathered again in the backward or kept for it; hpZ where it applies."""
    quantized = ("--quantized-weights", "--quantized-gradients")
    rows: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, title, arguments in (
        ("zero3", "DeepSpeed ZeRO-3", ()),
        ("qwz_qgz", "DeepSpeed ZeRO++ (qwZ, qgZ)", quantized),
        ("muon", "DeepSpeed ZeRO-3, Muon", _WITH_MUON),
    ):
        rows[name] = title, arguments
        rows[f"{name}_keep"] = f"{title}, weights kept for the backward", (*arguments, "--keep")
    if nodes > 1 and ranks_per_node > 1:
        hpz = ("--hpz", str(ranks_per_node))
        rows["zeropp"] = ("DeepSpeed ZeRO++ (qwZ, hpZ, qgZ)", (*quantized, *hpz))
    return {
        f"deepspeed_{name}": Contestant("deepspeed", title, "benchmarks.contest.train_deepspeed", arguments)
        for name, (title, arguments) in rows.items()
    }
