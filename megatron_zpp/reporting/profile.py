"""Traces steps with torch's profiler."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.config.timing import TimingConfig


class StepProfiler:
    """Records the steps that --profile asks for, on the ranks of --profile-ranks, one file per rank."""

    def __init__(self, config: TimingConfig, rank: int, device: torch.device) -> None:
        self._config, self._rank = config, rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._wanted = config.profile and rank in config.profile_ranks
        self._running: profile | None = None

    def before_step(self, step: int) -> None:
        """Start the trace at --profile-step-start; `step` counts from 1."""
        if self._wanted and step == self._config.profile_step_start:
            self._running = profile(activities=self._activities)
            self._running.start()

    def ends_after(self, step: int) -> bool:
        """Whether `step` is the last step of the trace; equal on all ranks."""
        return self._config.profile and step + 1 == self._config.profile_step_end

    def end(self) -> str:
        """Write this rank's trace, if it has one, and return the line that says where the traces are."""
        directory = Path(self._config.profile_dir)
        if self._running is not None:
            self._running.stop()
            directory.mkdir(parents=True, exist_ok=True)
            self._running.export_chrome_trace(str(directory / f"rank{self._rank}.trace.json.gz"))
            self._running = None
        first, end = self._config.profile_step_start, self._config.profile_step_end
        return f" wrote traces of steps {first} to {end - 1} to {directory}"
