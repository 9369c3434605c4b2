"""The training loop: steps, and between them logging, evaluation and saving."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from megatron_zpp.data.documents import counted_share
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.samples import Samples
from megatron_zpp.model.gpt import GPT
from megatron_zpp.reporting.timing import BATCH, FORWARD_BACKWARD, OPTIMIZER, STEP
from megatron_zpp.train.run import Run
from megatron_zpp.train.steps.evaluation import evaluate, own_share
from megatron_zpp.train.steps.log_head import head_lines
from megatron_zpp.train.steps.skips import SkipFlag
from megatron_zpp.train.steps.step_log import StepLog
from megatron_zpp.train.steps.stopping import Ending, Stop, StopConditions
from megatron_zpp.zero.engine import Batch, StepResult

if TYPE_CHECKING:
    from megatron_zpp.reporting.profile import StepProfiler
    from megatron_zpp.train.islands import Islands
    from megatron_zpp.train.outer_alone import OuterAlone
    from megatron_zpp.train.saving.saver import Saver


def train(run: Run) -> Ending:
    """Log how the run came about and train to its end; every rank must call it, once."""
    reporter = run.reporter
    with reporter, run.ranks.errors_told():
        for line in (*head_lines(run), *run.lines):
            reporter.say(line)
        if run.start.iteration >= run.schedule.iterations:
            reporter.say(
                f" the run is complete: iteration {run.start.iteration} of {run.schedule.iterations}"
            )
        trainer = Trainer(run)
        stop = trainer.run()
        reporter.status = stop.status if stop and stop.is_error else 0
        run.ranks.activity.now("closing logs", patient=True)
    return Ending(trainer.progress.iteration, stop, reporter.lost_sinks)


class Trainer:
    """Takes the steps of a run, and evaluates, logs and saves between them. Read `run` first."""

    # Of runs with --save, outer steps, --sample-prompt and --profile, which alone import them
    _saver: "Saver | None" = None
    _outer: "Islands | OuterAlone | None" = None
    _write_texts: Callable[[], list[str]] | None = None
    _profiler: "StepProfiler | None" = None

    def __init__(self, run: Run) -> None:
        config, engine, ranks = run.config, run.engine, run.ranks
        self._config, self._engine, self._activity = config, engine, ranks.activity
        self._splits, self._schedule, self._reporter = run.splits, run.schedule, run.reporter
        self.progress = run.start
        if config.checkpoint.save is not None:
            from megatron_zpp.train.saving.saver import Saver

            self._saver = Saver(run)
        self._stops = StopConditions(config.training, engine, ranks.signals, ranks.lease)
        if config.islands.outer_alone:
            from megatron_zpp.train.outer_alone import OuterAlone

            self._outer = OuterAlone(run)
        elif run.outer is not None:
            from megatron_zpp.train.islands import Islands

            self._outer = Islands(
                run,
                now=lambda text: self._activity.now(text, patient=True),
                check_stop=self._stops.between_rounds,
            )
        prompts = config.evaluation.sample_prompt
        if prompts is not None:
            from megatron_zpp.train.steps.sampled_text import text_writer

            self._write_texts = text_writer(engine, config, prompts)
        self._head = cast(GPT, engine.model).head
        self._losses = (2,) if config.training.z_loss_coeff else ()  # their shape: the z-loss is second
        if config.timing.profile:
            from megatron_zpp.reporting.profile import StepProfiler, profile_directory

            directory, rank = profile_directory(config.logging), engine.topology.rank
            self._profiler = StepProfiler(config.timing, directory, rank, engine.device)
            if missed := self._profiler.misses(range(run.start.iteration + 1, run.schedule.iterations + 1)):
                self._reporter.say(missed)
        self._log = StepLog(run)
        self._skip_flag = SkipFlag(engine.device)
        self._evaluated: dict[str, int] = {}  # split -> iteration of its last evaluation
        self._samples = 0  # of the newest step
        self._per_token = config.training.calculate_per_token_loss and config.data.masks_loss
        shares_samples = engine.mesh.context_ranks > 1
        self._divides_counted = shares_samples and config.data.masks_loss and not self._per_token
        self._warm = False  # whether a step is done

    def run(self) -> Stop | None:
        """Train, evaluate and save to the end of the schedule or until there is a reason to stop.

        Returns the reason; None at the end of the schedule. A trace that is not complete then is written.
        """
        try:
            stop = self._run()
            if self._profiler and self._profiler.is_open:
                self._end_profile(self._profiler)
            return stop
        finally:
            if self._profiler:
                self._profiler.discard()
            if self._outer is not None:
                self._outer.close(ended=self.progress.iteration >= self._schedule.iterations)

    def _run(self) -> Stop | None:
        try:
            self._train()
            self._save()
            self._evaluate("valid", last=True)
            self._evaluate("test", last=True)
            self._finish_saving()
        except Stop as stop:
            return self._stopped(stop)
        return None

    def _stopped(self, stop: Stop) -> Stop:
        """Log the newest steps and save, if that is allowed; return the reason why the run ends."""
        self._log.rest(self.progress)
        if stop.saves:
            try:
                self._save()
            except Stop as damage:
                stop = damage
        if not stop.saves:
            if self._saver is not None:
                self._saver.abandon()
            return stop
        self._finish_saving()
        unsaved = "" if self._config.checkpoint.save else "; nothing is saved without --save"
        self._reporter.say(f" exiting at iteration {self.progress.iteration}: {stop}{unsaved}")
        return stop

    def _train(self) -> None:
        """Take the remaining steps. Raises Stop between two of them or during an evaluation."""
        if self._outer is not None:
            self.progress = self._outer.start(self.progress)
            self._outer_step(self._outer, begins=False)
        if self.progress.iteration == 0 or self.progress.evaluation_due:
            self._evaluate("valid")
        first = self.progress.iteration + 1
        with ExitStack() as stack:
            batches = iter(stack.enter_context(self._loader()))
            while self.progress.iteration < self._schedule.iterations:
                self._log.watch.resume()
                with self._engine.sections(STEP):
                    result = self._step(batches)
                    if self._outer is not None and self._outer_step(self._outer):
                        stack.close()
                        batches = iter(stack.enter_context(self._loader()))
                last = self.progress.iteration == self._schedule.iterations
                if last or self.progress.iteration % self._config.logging.log_interval == 0:
                    self._log.interval(self.progress)
                elif self.progress.iteration == first:
                    self._log.first_step(self.progress)
                self._log.watch.pause()
                if self._profiler and self._profiler.ends_after(self.progress.iteration):
                    self._end_profile(self._profiler)
                if self.progress.iteration % self._config.evaluation.eval_interval == 0:
                    self._evaluate("valid")
                if self._saver is not None:
                    self._saver.after_step()
                    if self._saver.due(self.progress):
                        self._save()
                self._stops.after_step(self.progress.iteration, result, last=last)
        self._stops.at_the_end()

    def _loader(self) -> MicroBatches:
        """The micro-batches from the present progress on."""
        return MicroBatches(
            self._splits.train,
            self._schedule.batches,
            rank=self._engine.mesh.data_rank,
            consumed=self.progress.consumed_samples,
            end=self._schedule.resumed(self.progress).samples,  # an island that was away has read others
            num_workers=self._config.data.num_workers,
            pin_memory=self._engine.device.type == "cuda",
        )

    def _outer_step(self, outer: "Islands | OuterAlone", *, begins: bool = True) -> bool:
        """Begin and end what is due of an outer step; returns whether other samples come next."""
        consumed = self.progress.consumed_samples
        if begins:
            self.progress = outer.begin(self.progress)
        last = self.progress.iteration >= self._schedule.iterations
        self.progress = outer.end(self.progress, last=last)
        self._log.more = outer.record
        return self.progress.consumed_samples != consumed

    def _save(self) -> None:
        self._log.settle()
        self._count_if_skipped()
        if self._saver is not None:
            self._activity.now(f"saves iteration {self.progress.iteration}", patient=True)
            self._stops.before_save()
            self._saver.save(self.progress)

    def _finish_saving(self) -> None:
        if self._saver is not None:
            self._activity.now("waits for the last save", patient=True)
            self._saver.finish()

    def _step(self, batches: Iterator[Batch]) -> StepResult:
        """One optimizer step on the next global batch."""
        consumed, schedule = self.progress.consumed_samples, self._schedule.batches
        mesh, islands = self._engine.mesh, self._config.islands
        micro_batches = schedule.micro_batches_at(consumed)
        losses, weights = torch.zeros(self._losses, device=self._engine.device), 0.0
        self._engine.take_traffic()  # discards the traffic of an evaluation
        where, sections = f"step {self.progress.iteration + 1}", self._engine.sections
        if self._profiler:
            self._profiler.before_step(self.progress.iteration + 1)
        in_backward = self._config.optimizer.optimizer_in_backward
        if in_backward:
            rates = self._rates()
            self._engine.begin_step(*rates)
        for index in range(micro_batches):
            first_sample, _ = schedule.micro_batch(consumed, index, mesh.data_rank)
            of_all = first_sample * islands.count + islands.number
            seed_dropout(self._config.training.seed, of_all, mesh.tensor_rank, self._engine.device)
            self._mark(f"{where}, reading micro-batch {index + 1} of {micro_batches}")
            with sections(BATCH):
                batch = next(batches)
            self._mark(f"{where}, micro-batch {index + 1} of {micro_batches}")
            share = own_share(batch, mesh)
            weight = share if self._per_token else None
            if self._divides_counted:  # the ranks' losses are means over their own tokens that count
                whole = counted_share(batch)
                weight = share / whole if whole else 1.0
            with sections(FORWARD_BACKWARD):
                loss = self._engine.accumulate(batch, index=index, micro_batches=micro_batches, weight=weight)
                if (z_loss := self._head.z_loss) is not None:
                    loss = torch.stack((loss, z_loss))
                losses += loss if share == 1 else loss * share
                weights += share
        self._mark(f"{where}, optimizer")
        if not in_backward:
            rates = self._rates()
        with sections(OPTIMIZER):
            result = self._engine.step(*rates)
        self._skip_flag.send(result.skipped)
        self._samples = samples = schedule.global_batch_size_at(consumed)
        self.progress = replace(
            self.progress, iteration=self.progress.iteration + 1, consumed_samples=consumed + samples
        )
        self._log.add(losses, weights, result, samples, *rates)
        self._warm = True
        self._mark(f"{where}, report")
        return result

    def _rates(self) -> tuple[float, float | None]:
        """The learning rates of the step that begins; waits until states that are being saved may change."""
        if self._saver is not None:
            self._saver.before_step()
        self._count_if_skipped()
        schedule = self._schedule
        return schedule.learning_rate_at(self.progress), schedule.decoupled_rate_at(self.progress)

    def _count_if_skipped(self) -> None:
        """Count the newest step if it was skipped; call it before a rate or a checkpoint uses the count."""
        if not self._skip_flag.read():
            return
        self.progress = replace(
            self.progress,
            skipped_iterations=self.progress.skipped_iterations + 1,
            skipped_samples=self.progress.skipped_samples + self._samples,
        )

    def _end_profile(self, profiler: "StepProfiler") -> None:
        """Write the trace; other ranks wait the seconds that this takes."""
        self._activity.now("writes a trace", patient=True)
        self._reporter.say(profiler.end(self.progress.iteration))

    def _mark(self, text: str) -> None:
        """Mark the activity; the first step is patient because it builds kernels and allocates buffers."""
        self._activity.now(text, patient=not self._warm)

    def _evaluate(self, split: str, *, last: bool = False) -> None:
        """Evaluate a split, unless it was in this iteration; `last`: after the training."""
        samples: Samples | None = getattr(self._splits, split)
        iteration = self.progress.iteration
        if samples is None or self._evaluated.get(split) == iteration:
            return
        self._log.settle()
        evaluation, batches = self._config.evaluation, self._schedule.batches
        count = evaluation.eval_iters * batches.global_batch_size
        if evaluation.full_validation:
            assert samples.windows_per_epoch is not None  # Config refuses endless data with --full-validation
            count = samples.windows_per_epoch

        def before_round(number: int, rounds: int) -> None:
            # The first one builds kernels without gradients, which no step uses.
            builds = number == 0 and not self._evaluated
            where = f"evaluation of {split} at iteration {iteration}, round {number + 1} of {rounds}"
            self._activity.now(where, patient=builds or not self._warm)
            self._stops.between_rounds()

        # After the last step every start evaluates anyway.
        self.progress = replace(self.progress, evaluation_due=iteration < self._schedule.iterations)
        with nullcontext() if self._outer is None else self._outer.averaged(self.progress):
            loss = evaluate(
                self._engine,
                samples,
                count=count,
                micro_batch_size=batches.micro_batch_size,
                before_round=before_round,
            )
            texts = None
            if split == "valid" and self._write_texts is not None:
                self._activity.now(f"writes text at iteration {iteration}", patient=True)
                texts = self._write_texts()
        self._evaluated[split] = iteration
        self.progress = replace(self.progress, evaluation_due=False)
        self._reporter.evaluation(self.progress, split, loss, last=last)
        if texts is not None:
            self._reporter.texts(self.progress, texts)


def seed_dropout(seed: int, first_sample: int, tensor_rank: int, device: torch.device) -> None:
    """Seed dropout from `seed` and a micro-batch's first sample, for any number of data ranks or resume.

    Tensor ranks drop out of different tokens and heads of a micro-batch, so that each has masks of its own.
    Context ranks have one state: see model/context/dropout.py.
    """
    key = f"dropout/{seed}/{first_sample}" + (f"/{tensor_rank}" if tensor_rank else "")
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(drawn)  # torch.manual_seed seeds all kinds of devices: 0.1 ms or more
    if device.type == "cuda":
        torch.cuda.manual_seed(drawn)
