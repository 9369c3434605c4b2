"""Who is written when, and that nobody's text depends on it; with a small model that can be held."""

import threading

import pytest
import torch

pytest.importorskip("aiohttp", reason="the server's package; pip install -r launch/requirements-serve.txt")

from megatron_zpp.generate.batch import Batch
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.scheduler import GenerationFailed, Job, Scheduler
from megatron_zpp.generate.text import Continuation, Order
from tests.generate.http_site import IDS, POSITIONS, Gate


@pytest.fixture
def gate() -> Gate:
    return Gate()


class Asked:
    """A job and how it ended."""

    def __init__(self, gate: Gate, texts: int, tokens: int) -> None:
        orders = [Order((1 + n,), tokens, Sampling(temperature=0), 1) for n in range(texts)]
        self.ended, self.failure = threading.Event(), None
        self.job = Job([Continuation(order, gate.tokenizer) for order in orders], self._end)

    def _end(self, failure: GenerationFailed | None) -> None:
        assert not self.ended.is_set()
        self.failure = failure
        self.ended.set()


@pytest.fixture
def scheduler(gate: Gate) -> Scheduler:
    made = Scheduler(gate.model, 1)
    yield made
    gate.go_on.set()
    made.close()


def test_a_request_of_many_texts_holds_up_no_other(gate: Gate, scheduler: Scheduler) -> None:
    gate.go_on.clear()
    many, one = Asked(gate, 6, 3), Asked(gate, 1, 3)
    scheduler.submit(many.job)
    assert gate.busy.wait(60)
    scheduler.submit(one.job)
    gate.pause = 0.01
    gate.go_on.set()
    assert one.ended.wait(60)
    assert not many.ended.is_set()
    assert many.ended.wait(60)
    assert all(text.finish for text in many.job.texts)


def test_a_cancelled_job_is_forgotten_whether_it_runs_or_waits(gate: Gate, scheduler: Scheduler) -> None:
    gate.go_on.clear()
    running, waiting, last = Asked(gate, 2, 50), Asked(gate, 1, 50), Asked(gate, 1, 2)
    for asked in (running, waiting, last):
        scheduler.submit(asked.job)
    assert gate.busy.wait(60)
    scheduler.cancel(running.job)
    scheduler.cancel(waiting.job)
    gate.go_on.set()
    assert last.ended.wait(60)
    assert not running.ended.is_set()
    assert not waiting.ended.is_set()
    assert gate.passes <= 3


def test_an_error_in_a_pass_ends_those_who_took_part_and_no_others(
    gate: Gate, scheduler: Scheduler, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = gate.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    first, second = Asked(gate, 1, 3), Asked(gate, 1, 3)
    scheduler.submit(first.job)
    assert first.ended.wait(60)
    assert "division by zero" in str(first.failure)
    assert "ZeroDivisionError" in capfd.readouterr().err
    broken.remove()
    scheduler.submit(second.job)
    assert second.ended.wait(60)
    assert second.failure is None


def test_a_text_is_what_it_is_alone_whenever_others_join_and_leave(gate: Gate) -> None:
    """Drawn in several ways; the likeliest and drawn ids are equal, log-probabilities up to sums in fp32."""
    drawn = torch.Generator().manual_seed(1)
    ways = [Sampling(0), Sampling(1.0, 0, 0.9), Sampling(0.7, 5), Sampling(1.3)]
    orders = []
    for number in range(24):
        length = 1 + (number * 11) % 40
        prompt = tuple(torch.randint(IDS, (length,), generator=drawn).tolist())
        tokens = 1 + (number * 7) % (POSITIONS - length)
        orders.append(
            Order(prompt, tokens, ways[number % 4], number, alternatives=number % 3, score_prompt=True)
        )

    def write(batch: Batch, text: Continuation) -> Continuation:
        batch.add(text)
        while not text.ended:
            batch.step()
        return text

    alone = [write(Batch(gate.model, 1), Continuation(order, gate.tokenizer)) for order in orders]
    batch, together = Batch(gate.model, 5), [Continuation(order, gate.tokenizer) for order in orders]
    waiting = list(together)
    for step in range(10_000):
        while batch.free and waiting and (step % 3 == 0 or not len(batch)):
            batch.add(waiting.pop(0))
        if not len(batch):
            break
        batch.step()
    for one, other in zip(alone, together, strict=True):
        assert other.ended
        assert one.ids == other.ids
        for mine, theirs in ((one.scores, other.scores), (one.prompt_scores, other.prompt_scores)):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert a.log_probability == pytest.approx(b.log_probability, abs=1e-4)
                assert [token for token, _ in a.likeliest] == [token for token, _ in b.likeliest]
