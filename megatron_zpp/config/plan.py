"""What a dry run plans with: ranks, GPUs and the link between nodes, none of which has to be there."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error

_MOST_RANKS = 2**16
_DEFAULTS = {"plan_gpu": "h100", "plan_link_gbit": 100.0}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """dry run: what a run would take, said before a GPU is taken"""

    dry_run: bool = option(
        False, "Check all that a run checks, print memory, traffic and step time, and exit; needs no GPU."
    )
    plan_nodes: int | None = option(
        None, "Nodes to plan for; default those of the launcher, else 1.", at_least=1, at_most=_MOST_RANKS
    )
    plan_gpus_per_node: int | None = option(
        None,
        "GPUs of a node; default the launcher's ranks of a node, else 1.",
        at_least=1,
        at_most=_MOST_RANKS,
    )
    plan_gpu: Literal["h100", "h200", "a100", "v100"] | None = option(None, "Their kind; default h100.")
    plan_link_gbit: float | None = option(
        None, "Gbit/s, each way, that a node reaches with the others; default 100.", above=0
    )
    plan_compute_share: float | None = option(
        None,
        "Share of the GPU's peak that forward and backward reach; default by GPU, and the plan says it.",
        above=0,
        at_most=1,
    )

    def check(self) -> None:
        """The others mean nothing without --dry-run."""
        for name in ("plan_nodes", "plan_gpus_per_node", "plan_compute_share", *_DEFAULTS):
            value = getattr(self, name)
            if value is not None and not self.dry_run:
                raise option_error("--" + name.replace("_", "-"), value, "needs --dry-run")
        for name, default in _DEFAULTS.items():
            if self.dry_run and getattr(self, name) is None:
                object.__setattr__(self, name, default)
