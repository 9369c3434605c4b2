"""What a dry run plans for: nodes, GPUs and the link between nodes, none of which need to exist."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, count, option_error, optional, switch

_MOST_RANKS = 2**16
LINK = "--plan-link-gbit"
DEFAULT_LINK = 100.0  # Gbit/s, for --zero-stage auto and --micro-batch-size auto
# Gbit/s of usual nodes of eight GPUs, in each direction, as their vendors say.
LINKS = {
    "dgx-h100": 3200,  # 8 × 400, as most nodes of eight H100s, H200s or B200s on InfiniBand
    "dgx-a100": 1600,  # 8 × 200
    "aws-p5": 3200,
    "aws-p4d": 400,
    "azure-nd-h100-v5": 3200,
    "azure-nd-a100-v4": 1600,
    "gcp-a3-mega": 1800,
    "gcp-a3-high": 1000,
    "gcp-a2": 100,
    "100gbe": 100,
    "25gbe": 25,
}
_USUAL = ", ".join(f"{name} ({gbit})" for name, gbit in LINKS.items())


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """dry run: predict memory, traffic and step time without a GPU, and search the best settings"""

    dry_run: bool = switch(
        "Check the settings and data, print the best settings, memory, traffic and step time, and exit; "
        "needs no GPU."
    )
    plan_nodes: int | None = count(
        None, "Number of nodes; default the launcher's, else 1.", needs="--dry-run", at_most=_MOST_RANKS
    )
    plan_gpus_per_node: int | None = count(
        None,
        "GPUs per node; default the launcher's ranks per node, else 1.",
        needs="--dry-run",
        at_most=_MOST_RANKS,
    )
    plan_gpu: Literal["h100", "h200", "a100", "v100"] | None = optional(
        "GPU model; default h100.", needs="--dry-run", implied="h100"
    )
    plan_link_gbit: str | None = optional(
        "Bandwidth of a node to other nodes, Gbit/s in each direction, or the name of a usual node: "
        f"{_USUAL}. Needs --dry-run, which needs it for several nodes, or a value that is auto, for which it "
        f"is {DEFAULT_LINK:g} by default.",
        metavar="X",
    )
    plan_island_mbit: float | None = optional(
        "Bandwidth of an island to the hub, Mbit/s in each direction, from which the smallest "
        "--outer-interval follows.",
        needs="--dry-run",
        above=0,
    )

    def check(self) -> None:
        """Fill in the GPU of a dry run, and refuse a link that is no number and no name."""
        self.fill_implied()
        with suppress(ValueError):  # of text that is no number
            if self.link is None or 0 < self.link < math.inf:
                return
        raise self.error("plan_link_gbit", f"must be a number above 0, or one of {_USUAL}")

    @property
    def link(self) -> float | None:
        """Gbit/s of a node to others; None if it is not given."""
        link = self.plan_link_gbit
        return None if link is None else float(LINKS.get(link, link))

    def link_of(self, nodes: int) -> float:
        """Gbit/s of each of so many nodes. Raises ValueError if several have none."""
        if self.link is None and nodes > 1:
            raise option_error(LINK, "(not given)", NO_LINK)
        return self.link or DEFAULT_LINK


NO_LINK = f"give what a node's network reaches in Gbit/s, or the name of a usual node: {_USUAL}"
