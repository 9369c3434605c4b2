"""Traces steps with torch's profiler."""

import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.config.run import LoggingConfig, TimingConfig
from megatron_zpp.config.values.urls import check_local_directory
from megatron_zpp.storage.files import naming


def profile_directory(logging: LoggingConfig) -> Path:
    """Where traces are written: below --tensorboard-dir, as by Megatron-LM, else in the working directory."""
    return Path(logging.tensorboard_dir or "", "profile")


def check_profile(logging: LoggingConfig) -> None:
    """Raise ValueError, before anything is built, if the traces of --profile cannot be written."""
    check_local_directory("--profile", str(profile_directory(logging)))


class StepProfiler:
    """Records the steps that --profile asks for, on the ranks of --profile-ranks, one file per rank."""

    def __init__(self, config: TimingConfig, directory: Path, rank: int, device: torch.device) -> None:
        self._config, self._directory, self._rank = config, directory, rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._first: int | None = None  # step of the trace that is open, on all ranks alike

    @property
    def is_open(self) -> bool:
        """Whether a trace has begun and has not been written; equal on all ranks."""
        return self._first is not None

    def misses(self, steps: range) -> str | None:
        """A line if none of the `steps` of a run is to be recorded."""
        start, end = self._config.profile_step_start, self._config.profile_step_end
        if not steps or (start <= steps[-1] and steps[0] < end):
            return None
        taken = f"this run takes {steps[0]} to {steps[-1]}"
        return f" --profile records nothing: its steps are {start} to before {end}, and {taken}"

    def before_step(self, step: int) -> None:
        """Start the trace at --profile-step-start, or where the run resumes behind it; steps count from 1."""
        timing = self._config
        if self._first is None and timing.profile_step_start <= step < timing.profile_step_end:
            self._first = step
            if self._rank in timing.profile_ranks:
                self._running = profile(activities=self._activities)
                self._running.start()

    def ends_after(self, step: int) -> bool:
        """Whether `step` is the last step of the trace; equal on all ranks."""
        return self.is_open and step + 1 == self._config.profile_step_end

    def end(self, step: int) -> str:
        """Write this rank's trace, if it has one, and return the line that says where the traces are.

        `step` is the last one of the trace.
        """
        first, self._first = self._first, None
        directory = self._directory
        if self._running is not None:
            running = self._stop()
            directory.mkdir(parents=True, exist_ok=True)
            name = f"rank{self._rank}.trace.json.gz"
            with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=directory) as private:
                with naming(directory / name):
                    running.export_chrome_trace(str(Path(private) / name))
                os.replace(Path(private) / name, directory / name)  # a link that has the name is not followed
        return f" wrote traces of steps {first} to {step} to {directory}"

    def discard(self) -> None:
        """End a trace without writing it: a process that exits while it is recorded crashes."""
        if self._running is not None:
            self._stop()

    def _stop(self) -> profile:
        assert self._running is not None
        running, self._running = self._running, None
        running.stop()
        return running
