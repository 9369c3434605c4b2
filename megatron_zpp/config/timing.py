"""Where the time of a step is measured to go, and the steps whose trace is kept."""

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error

PROFILE_FLAGS = {
    "profile_step_start": 10,
    "profile_step_end": 12,
    "profile_ranks": (0,),
    "profile_dir": "profile",
}


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Options):
    """timing: where the time of a step goes"""

    timing_log_level: Literal["0", "1", "2"] = option(
        "0", "1: log the time of a step's parts, the least and the most of any rank; 2: also of their parts."
    )
    log_straggler: bool = option(
        False, "Log how long each rank was busy, without its waits for others, and name the slowest."
    )
    profile: bool = option(
        False, "Keep a trace of some steps: files that ui.perfetto.dev and chrome://tracing open."
    )
    profile_step_start: int = option(PROFILE_FLAGS["profile_step_start"], "First step of it.", at_least=1)
    profile_step_end: int = option(
        PROFILE_FLAGS["profile_step_end"], "The step after the last one of it.", at_least=2
    )
    profile_ranks: tuple[int, ...] = option(
        PROFILE_FLAGS["profile_ranks"], "Ranks that keep one each.", at_least=0
    )
    profile_dir: str = option(PROFILE_FLAGS["profile_dir"], "Where the files go.")

    def check(self) -> None:
        """The steps are there, and the flags that need --profile have it."""
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
        """Raises ValueError for a trace of a rank that is not there."""
        for rank in self.profile_ranks:
            if self.profile and rank >= ranks:
                raise option_error(
                    "--profile-ranks", self.profile_ranks, f"this run has ranks 0 to {ranks - 1}"
                )

    @property
    def level(self) -> int:
        """--timing-log-level; 2 where parts of parts are needed to tell stragglers."""
        return 2 if self.log_straggler else int(self.timing_log_level)
