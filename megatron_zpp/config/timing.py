"""Which parts of a step are timed, and which steps are traced."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error

PROFILE_FLAGS = {
    "profile_step_start": 10,
    "profile_step_end": 12,
    "profile_ranks": (0,),
}


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Options):
    """timing: how long the parts of a step take"""

    timing_log_level: Literal["0", "1", "2"] = option(
        "0",
        "1: log the time of each part of a step in ms, the minimum and maximum over ranks; 2: also of "
        "their parts. 0: off.",
    )
    log_straggler: bool = option(
        False, "Log the time that each rank was busy, without waits for other ranks, and name the slowest."
    )
    profile: bool = option(
        False,
        "Record a trace of some steps, for ui.perfetto.dev, in profile, below --tensorboard-dir if given.",
    )
    profile_step_start: int = option(
        PROFILE_FLAGS["profile_step_start"], "First step of the trace.", at_least=1
    )
    profile_step_end: int = option(
        PROFILE_FLAGS["profile_step_end"], "Step after the last one of the trace.", at_least=2
    )
    profile_ranks: tuple[int, ...] = option(
        PROFILE_FLAGS["profile_ranks"], "Ranks that record a trace each.", at_least=0
    )

    def check(self) -> None:
        """Refuse an empty range of steps, and the other flags without --profile."""
        if not self.profile:
            for name, default in PROFILE_FLAGS.items():
                if getattr(self, name) != default:
                    raise option_error("--" + name.replace("_", "-"), getattr(self, name), "needs --profile")
        if self.profile_step_end <= self.profile_step_start:
            raise option_error(
                "--profile-step-end",
                self.profile_step_end,
                f"must be above --profile-step-start {self.profile_step_start}",
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if a rank to trace does not exist."""
        for rank in self.profile_ranks:
            if self.profile and rank >= ranks:
                raise option_error(
                    "--profile-ranks", self.profile_ranks, f"this run has ranks 0 to {ranks - 1}"
                )

    @property
    def level(self) -> int:
        """--timing-log-level as a number; 2 with --log-straggler, which needs the finer parts."""
        return 2 if self.log_straggler else int(self.timing_log_level)
