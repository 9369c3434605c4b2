"""What a person sees: Megatron-LM's line for scripts, and on a terminal a bar with loss and rate."""

import fcntl
import os
import re
import struct
import sys
import termios
import threading
from dataclasses import dataclass

import pytest
import torch

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.colour import wants_colour
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import Console, log_line
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.reporting.slow_work import SlowWork

RECORD = {
    "iteration": 5,
    "consumed_samples": 40,
    "elapsed_ms": 100.0,
    "tflops_per_gpu": 1.5,
    "learning_rate": 1e-3,
    "global_batch_size": 8,
    "lm_loss": 3.25,
    "loss_scale": 1.0,
    "grad_norm": 0.5,
    "skipped": 0,
    "nan": 0,
    "tokens_per_second": 12_345.0,
    "mfu": 0.415,
}


def read_terminal(master: int) -> str:
    """The output of a terminal so far, possibly incomplete; "" if the other side is closed."""
    try:
        return os.read(master, 2**16).decode(errors="replace")
    except OSError:  # EIO: how Linux says that a terminal has ended
        return ""


class Terminal:
    """A terminal in place of some of sys's streams; `seen` is what was written to it, once it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *streams: str) -> None:
        self._patch, self._streams, self.seen = monkeypatch, streams, ""

    def __enter__(self) -> "Terminal":
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 170, 0, 0))  # rows and columns
        self._file = open(slave, "w")
        for stream in self._streams:
            self._patch.setattr(sys, stream, self._file)
        self._patch.setenv("TERM", "xterm")
        self._patch.delenv("NO_COLOR", raising=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._patch.undo()
        self.seen = "".join(iter(lambda: read_terminal(self._master), ""))
        os.close(self._master)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The bar goes to stderr, so that a log of stdout contains only lines."""
    with Terminal(monkeypatch, "stderr") as terminal:
        console = Console(iterations=10, done=4)
        console.step_done()
        console.log(RECORD)
        console.close()
    seen = without_colours(terminal.seen)
    assert re.search(r"training: +50%.* 5/10 .*loss 3\.2500, 12\.3k tokens/s, MFU 41\.5%", seen)
    assert capsys.readouterr().out[30:] == f"{log_line(RECORD, 10)}\n"[30:]  # after the time


def test_lines_have_colours_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without the colours a line is the one that scripts parse, byte for byte."""

    def write() -> None:
        console = Console(iterations=10, done=4)
        console.log({**RECORD, "nan": 2})
        console.evaluation({"valid_loss": 3.0, "valid_perplexity": 20.1}, "valid", "iteration 5")
        console.say(" WARNING: a sink is lost")
        console.close()

    with Terminal(monkeypatch, "stdout") as terminal:
        write()
    write()
    plain = capsys.readouterr().out
    assert without_colours(terminal.seen).replace("\r\n", "\n")[30:] == plain[30:]  # after the time
    for coloured in ("\x1b[1;32m3.250000E+00\x1b[0m", "\x1b[1;31m  2\x1b[0m", "\x1b[33mWARNING:\x1b[0m"):
        assert coloured in terminal.seen
    assert "\x1b" not in plain


@pytest.mark.parametrize(
    ("split", "last", "where"),
    [
        ("valid", False, "iteration 5"),
        ("valid", True, "iteration 5 on validation set"),
        ("test", True, "iteration 5 on test set"),
    ],
)
def test_the_line_of_an_evaluation_is_megatrons(
    split: str, last: bool, where: str, capsys: pytest.CaptureFixture
) -> None:
    start = Progress(iteration=5)
    reporter = Reporter(
        LoggingConfig(), {}, Topology(), iterations=5, start=start, device=torch.device("cpu")
    )
    with reporter:
        reporter.evaluation(start, split, 3.0, last=last)
    line = f" validation loss at {where} | lm loss value: 3.000000E+00 | lm loss PPL: 2.008554E+01 |"
    assert capsys.readouterr().out.splitlines() == [line]


def test_no_color_and_dumb_terminals_are_respected() -> None:
    assert wants_colour(True, {"TERM": "xterm", "NO_COLOR": ""})
    assert not wants_colour(True, {"NO_COLOR": "1"})
    assert not wants_colour(True, {"TERM": "dumb"})
    assert not wants_colour(False, {})


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True)
class Work:
    text: str
    patient: bool


def watch(doing: list[tuple[float, Work]]) -> list[str]:
    """The lines said while the work at each of these times was seen once, in their order."""
    said: list[str] = []
    seen = iter(doing)
    ended = threading.Event()
    clock = Clock()

    def latest() -> Work:
        time, work = next(seen, (clock.seconds, Work("nothing", False)))
        clock.seconds = time
        if work.text == "nothing":
            ended.set()
        return work

    with SlowWork(latest, said.append, poll=0.001, clock=lambda: clock.seconds):
        assert ended.wait(60)
    return said


def test_slow_work_is_said_less_and_less_often_and_steps_are_not() -> None:
    loading, first, later = (
        Work("loading", True),
        Work("step 1, micro-batch 1 of 8", True),
        Work("step 2", False),
    )
    said = watch(
        [(float(second), loading) for second in range(0, 45)]
        + [(50.0, first), (55.0, first), (61.0, first), (70.0, later), (500.0, later)]
    )
    assert said == [
        "loading, 10 s so far",
        "loading, 20 s so far",
        "loading, 40 s so far",
        "step 1, micro-batch 1 of 8, 11 s so far",
    ]


def test_raised_units_are_in_the_line_of_runs_that_have_them() -> None:
    assert "raised units" not in log_line(RECORD, 10)
    assert "| raised units: 3 | tokens/s: 12345 |" in log_line({**RECORD, "raised_units": 3}, 10)


def test_mfu_of_8_bit_products_is_beside_that_of_16_bit_ones() -> None:
    line = log_line({**RECORD, "mfu": 0.4, "mfu_16bit": 0.8}, 10)
    assert "| MFU: 40.0% of the 8-bit peak, 80.0% of the 16-bit one | time left: " in line
