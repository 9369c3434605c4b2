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

    def is_open_after(self, step: int) -> bool:
        """Whether the trace has begun and is to have more steps than `step`; equal on all ranks."""
        timing = self._config
        return timing.profile and timing.profile_step_start <= step < timing.profile_step_end - 1

    def end(self, step: int) -> str:
        """Write this rank's trace, if it has one, and return the line that says where the traces are.

        `step` is the last one of the trace.
        """
        directory = Path(self._config.profile_dir)
        if self._running is not None:
            running = self._stop()
            directory.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(directory / f"rank{self._rank}.trace.json.gz"))
        return f" wrote traces of steps {self._config.profile_step_start} to {step} to {directory}"

    def discard(self) -> None:
        """End a trace without writing it: a process that exits while it is recorded crashes."""
        if self._running is not None:
            self._stop()

    def _stop(self) -> profile:
        assert self._running is not None
        running, self._running = self._running, None
        running.stop()
        return running
