"""Which text of which request is written when: a thread that owns the model, and a queue before it.

Between any two tokens the thread forgets requests that were cancelled, lets waiting texts join the running
batch where there is room, and hands out what the last pass has made certain. Requests take turns: one with
many texts holds up no other.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from megatron_zpp.config.command_line import one_line
from megatron_zpp.generate.batch import Batch
from megatron_zpp.generate.server_log import say_failure, say_traceback
from megatron_zpp.generate.text import Continuation, Piece
from megatron_zpp.model.gpt import GPT

OnPiece = Callable[[int, Piece], None]  # the number of the text, and its new tokens


class GenerationFailed(Exception):
    """A request could not be answered by this model; the message is one line."""


class Job:
    """The texts of one request. The callbacks run in the scheduler's thread and must return at once."""

    def __init__(
        self,
        texts: Sequence[Continuation],
        on_end: Callable[[GenerationFailed | None], None],
        on_piece: OnPiece | None = None,
    ) -> None:
        self.texts, self.on_end, self.on_piece = texts, on_end, on_piece
        self.cancelled = False
        self.unstarted: Iterator[Continuation] = iter(texts)
        self.left = len(texts)

    def report(self, text: Continuation) -> None:
        """Hand out what has become certain of a text."""
        if self.on_piece is not None and (piece := text.piece()) is not None:
            number = next(number for number, each in enumerate(self.texts) if each is text)
            self.on_piece(number, piece)


class Scheduler:
    """Writes the texts of all jobs, up to `size` at a time."""

    def __init__(self, model: GPT, size: int) -> None:
        self._model, self._size = model, size
        self._batch = Batch(model, size)
        self._jobs: dict[Continuation, Job] = {}  # of the texts in the batch
        self._waiting: deque[Job] = deque()  # those with texts that have not begun; guarded by _news
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. `on_end` will be called once, unless the job is cancelled before."""
        with self._news:
            self._waiting.append(job)
            self._news.notify()

    def cancel(self, job: Job) -> None:
        """Forget a job at the next token. It is no error if the job has ended."""
        with self._news:
            job.cancelled = True
            self._news.notify()

    def close(self) -> None:
        """End the thread at the next token; jobs that are left get no answer."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """Texts in the batch."""
        return len(self._jobs)

    def _run(self) -> None:
        while self._wait():
            try:
                changed = self._batch.step()
            except Exception as error:  # a bug of ours, or a device without memory: nobody waits for ever
                say_traceback()
                self._fail_all(one_line(error))
                continue
            for text in changed:
                self._hand_out(text)

    def _wait(self) -> bool:
        """Wait until there are texts to write, and let them join; return False when the thread should end."""
        with self._news:
            while True:
                self._forget_cancelled()
                ended = self._admit()
                if self._closed:
                    return False
                if self._jobs:
                    break
                if not ended:
                    self._news.wait()
        return True

    def _forget_cancelled(self) -> None:
        for text, job in list(self._jobs.items()):
            if job.cancelled:
                self._batch.remove(text)
                del self._jobs[text]
        self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def _admit(self) -> bool:
        """Let texts join; return whether some had ended before they began, such as those of no tokens."""
        ended = False
        while self._batch.free and self._waiting:
            job = self._waiting.popleft()
            text = next(job.unstarted, None)
            if text is None:
                continue
            self._waiting.append(job)
            self._jobs[text] = job
            if text.ended and not text.order.score_prompt:
                self._hand_out(text)
                ended = True
            else:
                self._batch.add(text)
        return ended

    def _hand_out(self, text: Continuation) -> None:
        job = self._jobs[text]
        if text.failure:
            say_failure(text.failure)
            del self._jobs[text]
            self._end(job, GenerationFailed(text.failure))
            return
        job.report(text)
        if text.ended:
            del self._jobs[text]
            job.left -= 1
            if not job.left:
                self._end(job, None)

    def _fail_all(self, message: str) -> None:
        self._batch = Batch(self._model, self._size)
        jobs = list(dict.fromkeys(self._jobs.values()))
        self._jobs.clear()
        for job in jobs:
            self._end(job, GenerationFailed(message))

    def _end(self, job: Job, failure: GenerationFailed | None) -> None:
        if not job.cancelled:
            job.cancelled = True  # its other texts need not be written
            job.on_end(failure)
