"""Which parts of a step are timed, and which steps are traced."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, count, option, switch


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Options):
    """timing: how long the parts of a step take"""

    timing_log_level: Literal["0", "1", "2"] = option(
        "0",
        "1: log the time of each part of a step in ms, the minimum and maximum over ranks; 2: also of "
        "their parts. 0: off.",
    )
    log_straggler: bool = switch(
        "Log the time that each rank was busy, without waits for other ranks, and name the slowest."
    )
    profile: bool = switch(
        "Record a trace of some steps, for ui.perfetto.dev, in profile, below --tensorboard-dir if given."
    )
    profile_step_start: int = count(10, "First step of the trace.", needs="--profile")
    profile_step_end: int = option(12, "Step after the last one of the trace.", needs="--profile", at_least=2)
    profile_ranks: tuple[int, ...] = option(
        (0,), "Ranks that record a trace each.", needs="--profile", at_least=0
    )

    def check(self) -> None:
        """Refuse an empty range of steps."""
        if self.profile_step_end <= self.profile_step_start:
            raise self.error(
                "profile_step_end",
                f"must be above --profile-step-start {self.profile_step_start}",
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if a rank to trace does not exist."""
        for rank in self.profile_ranks:
            if self.profile and rank >= ranks:
                raise self.error("profile_ranks", f"this run has ranks 0 to {ranks - 1}")

    @property
    def level(self) -> int:
        """--timing-log-level as a number; 2 with --log-straggler, which needs the finer parts."""
        return 2 if self.log_straggler else int(self.timing_log_level)
