"""Islands: jobs that train alone for many steps, and then exchange what their weights moved by."""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, count, option, optional, switch
from megatron_zpp.config.run import CheckpointConfig, TrainingConfig
from megatron_zpp.config.values.urls import local_path

_NEEDS = "--islands-at"
_OUTER_NEEDS = "--islands-at or --outer-alone"
OuterFormat = Literal["fp32", "bf16", "rotated4", "rotated2"]


@dataclass(frozen=True, kw_only=True)
class IslandsConfig(Options):
    """islands: jobs at several sites that train one model, and exchange weights once in many steps"""

    islands_at: str | None = optional(
        "Train as one of several islands, whose hub (megatron-zpp islands) listens there.",
        metavar="HOST:PORT",
    )
    island: str | None = optional("Name of this island, one of --island-names.", metavar="NAME", needs=_NEEDS)
    island_names: tuple[str, ...] | None = optional(
        "Names of all islands, in the same order everywhere: island k of M reads every M-th sample, from the "
        "k-th on.",
        metavar="NAME",
        needs=_NEEDS,
    )
    island_secret: str | None = optional(
        "File with the secret that all islands and the hub share.", metavar="FILE", needs=_NEEDS
    )
    outer_alone: bool = switch("Take outer steps without other islands, of what this run's weights moved by.")
    outer_interval: int = count(30, "Steps between outer steps.", needs=_OUTER_NEEDS)
    outer_lr: float = option(
        0.7, "Learning rate of the outer SGD with Nesterov momentum.", needs=_OUTER_NEEDS, above=0
    )
    outer_momentum: float = option(0.7, "Momentum of the outer SGD.", needs=_OUTER_NEEDS, at_least=0, below=1)
    outer_format: OuterFormat = option(
        "fp32", "Format in which an island sends what its weights moved by.", needs=_NEEDS
    )
    outer_overlap: int = option(
        0,
        "Take the result of an exchange this many steps after it began; it travels meanwhile. Below "
        "--outer-interval.",
        needs=_NEEDS,
        at_least=0,
        metavar="STEPS",
    )

    def check(self) -> None:
        """Require what an island cannot do without, and names that are plain, different and known."""
        self.check_alternatives("islands_at", "outer_alone")
        if self.islands_at is None:
            return
        from megatron_zpp.config.values.addresses import host_and_port

        host_and_port(_NEEDS, self.islands_at)
        names = self.island_names or ()
        if len({*names}) != len(names) or len(names) < 2:
            raise self.error("island_names", "give the names of all islands, at least two and all different")
        if strange := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
            raise self.error("island_names", f"{strange[0]!r} may have only letters, digits, - and _")
        if self.island not in names:
            raise self.error("island", f"must be one of --island-names {' '.join(names)}")
        if self.island_secret is None:
            raise self.error(
                "island_secret", "give a file with the secret that all islands and the hub share"
            )
        local_path("--island-secret", self.island_secret)
        if self.outer_overlap >= self.outer_interval:
            raise self.error("outer_overlap", f"must be below --outer-interval {self.outer_interval}")

    def check_run(self, training: TrainingConfig, checkpoint: CheckpointConfig) -> None:
        """Raise ValueError for a run that cannot take outer steps, if it is to take some."""
        if self.takes_outer_steps and not checkpoint.save_optim:
            flag = "--outer-alone" if self.outer_alone else _NEEDS
            fix = f"contradicts {flag}: the outer states would be lost"
            raise checkpoint.error("save_optim", fix)
        if self.islands_at is None:
            return
        for name in ("train_samples", "train_tokens"):  # --rampup-batch-size needs the first
            if getattr(training, name) is not None:
                fix = f"contradicts {_NEEDS}: steps of an island that was away are skipped; use --train-iters"
                raise training.error(name, fix)
        if (training.train_iters or 0) % self.outer_interval:
            fix = (
                f"must be a multiple of --outer-interval {self.outer_interval}: a run ends with an outer step"
            )
            raise training.error("train_iters", fix)

    @property
    def takes_outer_steps(self) -> bool:
        """Whether the run has an outer optimizer."""
        return self.outer_alone or self.islands_at is not None

    def describe(self) -> str:
        """Return the outer optimizer, for the first lines of the log."""
        rule = f"SGD with Nesterov momentum {self.outer_momentum:g} and learning rate {self.outer_lr:g}"
        return f"after every {self.outer_interval} steps, {rule}"

    @property
    def number(self) -> int:
        """The place of this island among all, from 0."""
        return (self.island_names or ()).index(self.island or "") if self.islands_at else 0

    @property
    def count(self) -> int:
        """The number of islands; 1 for a run without any."""
        return len(self.island_names or "1") if self.islands_at else 1
