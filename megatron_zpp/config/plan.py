"""What a dry run plans for: nodes, GPUs and the link between nodes, none of which need to exist."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option

_MOST_RANKS = 2**16
_DEFAULTS = {"plan_gpu": "h100", "plan_link_gbit": 100.0}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """dry run: predict memory, traffic and step time without a GPU"""

    dry_run: bool = option(
        False, "Check the settings and data, print memory, traffic and step time, and exit; needs no GPU."
    )
    plan_nodes: int | None = option(
        None,
        "Number of nodes; default the launcher's, else 1.",
        needs="--dry-run",
        at_least=1,
        at_most=_MOST_RANKS,
    )
    plan_gpus_per_node: int | None = option(
        None,
        "GPUs per node; default the launcher's ranks per node, else 1.",
        needs="--dry-run",
        at_least=1,
        at_most=_MOST_RANKS,
    )
    plan_gpu: Literal["h100", "h200", "a100", "v100"] | None = option(
        None, "GPU model; default h100.", needs="--dry-run"
    )
    plan_link_gbit: float | None = option(
        None,
        "Bandwidth of a node to other nodes, Gbit/s in each direction; default 100.",
        needs="--dry-run",
        above=0,
    )

    def check(self) -> None:
        """Fill in what a dry run plans for by default."""
        for name, default in _DEFAULTS.items():
            if self.dry_run and getattr(self, name) is None:
                object.__setattr__(self, name, default)
