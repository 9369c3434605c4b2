"""An island in its run: when it exchanges, what it waits for, and how it comes back."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.options import flag_name, option_error
from megatron_zpp.config.values.addresses import read_secret
from megatron_zpp.config.words import decimal_bytes
from megatron_zpp.islands.link import Link, Outcome
from megatron_zpp.islands.messages import TOO_SLOW, HubRefused
from megatron_zpp.tokenizer.base import in_words
from megatron_zpp.train.resume.changes import NUMBERING
from megatron_zpp.train.run import Run
from megatron_zpp.train.steps.stopping import Stop

_POLL = 0.1  # seconds between two looks at what is waited for, in which all ranks take part
_Result = TypeVar("_Result")


class Islands:
    """Takes the outer steps of a run. All ranks make the same calls.

    With an interval of H steps, outer step t begins after iteration (t + 1) · H. Its result is taken at once,
    or with --outer-overlap some steps later. An island that was left out of it takes the outer steps that it
    missed, and continues at the iteration that the others have reached.
    """

    def __init__(self, run: Run, *, now: Callable[[str], None], check_stop: Callable[[], None]) -> None:
        """`now` says what is waited for. `check_stop` raises, on all ranks, if the run has to end."""
        assert run.outer is not None
        self._config, self._state, self._engine = run.config.islands, run.outer, run.engine
        self._say, self._now, self._check_stop = run.reporter.say, now, check_stop
        assert self._config.islands_at is not None
        assert self._config.island is not None
        assert self._config.island_secret is not None
        self._island, self._iterations = self._config.island, run.schedule.iterations
        topology = self._engine.topology
        start = torch.tensor(secrets.randbits(62) * (topology.rank == 0), device=self._engine.device)
        self._link = Link(
            self._config.islands_at,
            read_secret("--island-secret", self._config.island_secret),
            island=self._island,
            rank=topology.rank,
            ranks=topology.world_size,
            start=str(self._engine.sum_over_ranks(start).item()),
            layout=self._state.layout,
            settings=_settings(run),
            length=self._iterations,
            say=(lambda line: self._say(f" {line}")) if topology.rank == 0 else lambda line: None,
            room=self._state.room,
        )
        self._checksum: Callable[[], int] = lambda: 0  # of the outer weights that the newest step began with
        self._joined = False  # whether others had the same
        self._under_way: Future[Outcome] | None = None
        self._began = self._ended = 0.0
        self._contributed: int | None = None  # samples read for this island's newest outer step, if known
        self._pace = self._resumed = 0.0  # seconds of a recent step; when the newest one began
        self._totals = [0, 0]  # bytes that all ranks had sent and received at the newest outer step
        self.record: dict[str, Any] = {}  # of the newest outer step, for the log

    def start(self, progress: Progress) -> Progress:
        """Join the other islands; returns the progress from which this one continues."""
        interval, under_way = self._config.outer_interval, progress.exchange_begun is not None
        if progress.iteration % interval == 0 and not under_way:
            self._contributed = progress.consumed_samples
        fix = "an exchange of the checkpoint is under way; give what it was saved with"
        if self._next(progress) < 0:
            raise option_error("--outer-interval", interval, fix)
        if self._newest()[0] >= self._next(progress) + under_way:
            return self._catch_up(progress)
        if under_way:
            if progress.iteration % interval and not self._config.outer_overlap:
                raise option_error("--outer-overlap", 0, fix)
            self._leave(progress, again=True)
        return progress

    def begin(self, progress: Progress) -> Progress:
        """Begin an exchange, if one is due after this iteration."""
        if self._resumed:
            took = time.monotonic() - self._resumed
            self._pace = 0.8 * self._pace + 0.2 * took if self._pace else took
        if progress.iteration % self._config.outer_interval:
            return progress
        progress = replace(progress, exchange_begun=progress.consumed_samples)
        self._leave(progress)
        return progress

    def end(self, progress: Progress, *, last: bool) -> Progress:
        """Take the result of the exchange under way, if it is due; returns the progress after it."""
        progress = self._end(progress, last=last)
        self._resumed = time.monotonic()
        return progress

    def _end(self, progress: Progress, *, last: bool) -> Progress:
        interval, overlap = self._config.outer_interval, self._config.outer_overlap
        if progress.exchange_begun is None or (progress.iteration % interval < overlap and not last):
            return progress
        assert self._under_way is not None
        started, step = time.monotonic(), self._next(progress)
        outcome = self._wait(self._under_way, f"outer step {step}")
        if self._island not in outcome.members:
            late = f"this island was {outcome.late:.1f} s behind the first at outer step {step}"
            if outcome.late:
                self._say(f" WARNING: {late}, so what it trained is lost: {TOO_SLOW}")
            return self._catch_up(progress)
        self._compare(outcome)
        waited = time.monotonic() - started
        self._log(step, outcome.members, waited)
        self._state.arrive(step, outcome.members, outcome.frames, self._island)
        self._contributed = progress.exchange_begun
        return replace(progress, exchange_begun=None)

    def _compare(self, outcome: Outcome) -> None:
        """Raise ValueError if this island has begun with other outer weights; warn if they differ later."""
        own = self._checksum()
        others = [name for name, weights in outcome.weights.items() if weights != own]
        fix = (
            f"its outer weights are not those of {', '.join(others)} before outer step {outcome.step}: start "
            "all islands from the same weights, or this one from another's checkpoint"
        )
        if others and not self._joined:
            raise option_error("--island", self._island, fix)
        if others:
            self._say(f" WARNING: --island {self._island}: {fix}")
        self._joined = True

    def averaged(self, progress: Progress) -> AbstractContextManager[None]:
        """Have the outer weights in the block, which all islands have, for an evaluation."""
        if progress.iteration % self._config.outer_interval == 0 and progress.exchange_begun is None:
            return nullcontext()  # they are the weights
        return self._state.averaged()

    def close(self, *, ended: bool) -> None:
        """Leave the hub; `ended`: this island has taken all of its steps."""
        self._link.close(ended=ended)

    def _next(self, progress: Progress) -> int:
        """The first outer step whose result this island has not taken."""
        return progress.iteration // self._config.outer_interval - (progress.exchange_begun is not None)

    def _leave(self, progress: Progress, *, again: bool = False) -> None:
        step, consumed = self._next(progress), progress.exchange_begun
        assert consumed is not None
        frames, self._checksum = self._state.leave(step, again=again)
        self._began, choose = time.monotonic(), self._state.wanted.choose
        memory = [frame.numpy() for frame in frames]
        self._under_way = self._link.exchange(step, memory, choose, consumed, self._checksum)
        self._under_way.add_done_callback(self._note_end)

    def _note_end(self, exchange: Future[Outcome]) -> None:
        self._ended = time.monotonic()

    def _catch_up(self, progress: Progress) -> Progress:
        """Take all outer steps that others have taken without this island, and rejoin them.

        They have taken some inner steps since. This island takes as many as it can before the next outer
        step, so that nobody has to wait for it. It reads on behind the samples of the newest outer step that
        has something of it.
        """
        step, began, interval = self._next(progress), time.monotonic(), self._config.outer_interval
        if self._contributed is None and step:
            with suppress(HubRefused):  # of a step that is no longer kept
                self._contributed = self._past(step - 1).consumed.get(self._island)
        newest, left = self._newest()
        # A Stop ends it early: a checkpoint has to say what was replayed, and the next vote stops again.
        with suppress(Stop):
            while step <= newest:
                outcome = self._past(step)
                self._state.replay(step, outcome.members, outcome.frames)
                self._contributed = outcome.consumed.get(self._island, self._contributed)
                step += 1
                if step > newest:
                    newest, left = self._newest()
        self._state.give_up()
        iteration = step * interval
        if iteration < self._iterations:
            iteration += interval - left
        self._engine.iteration = iteration
        self._say(
            f" outer steps up to {step - 1} were taken without this island, which continues from them: "
            f"iteration {progress.iteration} becomes {iteration}, after {time.monotonic() - began:.1f} s"
        )
        if self._contributed is None:
            self._contributed = progress.consumed_samples
        return replace(progress, iteration=iteration, consumed_samples=self._contributed, exchange_begun=None)

    def _past(self, step: int) -> Outcome:
        """A closed outer step."""
        return self._wait(self._link.past(step, self._state.wanted.choose), f"what outer step {step} was")

    def _newest(self) -> tuple[int, int]:
        """The newest closed outer step, and how many steps this island can take before the next one.

        Both are the same on all ranks.
        """
        step, since, period = self._wait(self._link.newest(), "the hub")
        interval = left = self._config.outer_interval
        if period:
            left = min(max(int((period - since) / (self._pace or period / interval)), 1), interval)
        own = torch.tensor((step, left), device=self._engine.device) * (self._engine.topology.rank == 0)
        step, left = self._engine.sum_over_ranks(own).tolist()
        return step, left

    def _wait(self, future: Future[_Result], what: str) -> _Result:
        """Wait until all ranks have a result, or the run has to end."""
        self._now(f"waits for {what}")
        while True:
            with suppress(NotYet):
                future.exception(_POLL)
            waiting = torch.tensor(float(not future.done()), device=self._engine.device)
            if not self._engine.sum_over_ranks(waiting).item():
                return future.result()
            self._check_stop()

    def _log(self, step: int, members: Sequence[str], waited: float) -> None:
        """Keep the figures of an outer step for the log, of all ranks together, and say them."""
        traffic = self._link.traffic
        counted = torch.tensor([traffic.sent, traffic.received], device=self._engine.device)
        totals = self._engine.sum_over_ranks(counted).tolist()
        sent, received = (now - before for now, before in zip(totals, self._totals, strict=True))
        seconds, self._totals = self._ended - self._began, totals
        self.record = {
            "outer_step": step,
            "islands": len(members),
            "outer_sent_bytes": sent,
            "outer_received_bytes": received,
            "outer_seconds": seconds,
            "outer_wait_seconds": waited,
        }
        sizes = f"{decimal_bytes(sent)} sent, {decimal_bytes(received)} received"
        took = f"in {seconds:.1f} s, of which the training waited {waited:.1f} s"
        self._say(f" outer step {step} of {', '.join(members)}: {sizes} {took}")


def _settings(run: Run) -> dict[str, Any]:
    """What must be the same for all islands, by flag or in words."""
    config, data = run.config, run.start.dataset_progress
    names = {part: list(of_part) for part, of_part in NUMBERING.items()}
    names["islands"] = ["island_names", "outer_interval", "outer_lr", "outer_momentum", "outer_format"]
    shapes = {each.name: each.shape for unit in run.engine.units for each in unit.layout.placements}
    read = data and [(p.fingerprint, p.stream, p.weight, p.consumed_before) for p in data.reading]
    return {
        **{flag_name(name): getattr(getattr(config, part), name) for part in names for name in names[part]},
        "--train-iters × --global-batch-size × islands": run.start.ordered_samples,  # of Megatron-LM's order
        "parameters": f"{len(shapes)}, {_digest(sorted(shapes.items()))}",
        "tokenizer": in_words(run.tokenizer),
        "data": _digest([data and data.since, read]),
    }


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
