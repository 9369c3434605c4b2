"""What a run prints: Megatron-LM's line for scripts, and lines about slow work."""

import fcntl
import os
import pty
import struct
import sys
import termios
import threading

import pytest

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.command_line import wants_colour
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import log_line, print_line, terminal_line
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.reporting.slow_work import slow_work
from tests.support import forked

RECORD = {"iteration": 5, "consumed_samples": 40, "elapsed_ms": 100.0, "tflops_per_gpu": 1.5}
RECORD |= {"learning_rate": 1e-3, "global_batch_size": 8, "lm_loss": 3.25, "loss_scale": 1.0}
RECORD |= {"grad_norm": 0.5, "skipped": 0, "nan": 0, "tokens_per_second": 12_345.0, "mfu": 0.415}


def test_lines_have_colours_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without the colours a line is the one that scripts parse, byte for byte."""
    line = " WARNING: a sink is lost"
    print_line(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_line(line)
    assert capsys.readouterr().out == " \x1b[33mWARNING:\x1b[0m a sink is lost\n"


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
    with Reporter(LoggingConfig(), {}, Topology(), iterations=5, start=start) as reporter:
        reporter.evaluation(start, split, 3.0, last=last)
    line = f" validation loss at {where} | lm loss value: 3.000000E+00 | lm loss PPL: 2.008554E+01 |"
    assert capsys.readouterr().out.splitlines() == [line]


def test_no_color_and_dumb_terminals_are_respected() -> None:
    assert wants_colour(True, {"TERM": "xterm", "NO_COLOR": ""})
    assert not wants_colour(True, {"NO_COLOR": "1"})
    assert not wants_colour(True, {"TERM": "dumb"})
    assert not wants_colour(False, {})


def watch(doing: list[tuple[float, tuple[str, bool]]]) -> list[str]:
    """The lines said while the work at each of these times was seen once, in their order."""
    said: list[str] = []
    seen, now, ended = iter(doing), 0.0, threading.Event()

    def latest() -> tuple[str, bool]:
        nonlocal now
        now, work = next(seen, (now, ("nothing", False)))
        if work[0] == "nothing":
            ended.set()
        return work

    with slow_work(latest, said.append, poll=0.001, clock=lambda: now):
        assert ended.wait(60)
    return said


def test_slow_work_is_said_less_and_less_often_and_steps_are_not() -> None:
    loading, first, later = ("loading", True), ("step 1, micro-batch 1 of 8", True), ("step 2", False)
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


def test_numbers_that_only_some_runs_have_are_in_their_lines() -> None:
    assert "raised units" not in log_line(RECORD, 10)
    assert "| raised units: 3 | tokens/s: 12345 |" in log_line({**RECORD, "raised_units": 3}, 10)
    line = log_line({**RECORD, "mfu": 0.4, "mfu_16bit": 0.8}, 10)
    assert "| MFU: 40.0% of the 8-bit peak, 80.0% of the 16-bit one | time left: " in line


LARGE = RECORD | {"iteration": 123_456, "elapsed_ms": 9994.0, "grad_norm": 1.234567, "lm_loss": 2.3456789}
LARGE |= {"tokens_per_second": 98_765_432.1}


def report() -> None:
    with Reporter(LoggingConfig(), {}, Topology(), iterations=500_000, start=Progress()) as reporter:
        reporter.log(RECORD)
        reporter.log(LARGE)
        reporter.texts(Progress(5), ["def f():\n\n  a\x1b" + "b" * 116])


def test_a_terminal_has_the_line_that_fits_it_and_a_pipe_megatrons() -> None:
    """A run writes to a terminal of 120 columns, and to a pipe."""
    read, write = pty.openpty()
    fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    forked(report, stdout=os.ttyname(write), TERM="xterm", COLUMNS="0")
    lines = os.read(read, 10_000).decode().splitlines()
    assert lines[0] == (
        " iteration 5/500000 | loss 3.2500 | norm 0.500 | lr 1.0e-03 | 100 ms | 12,345 tokens/s | MFU 41.5% "
        "| 13.9 h left"
    )
    assert len(lines[1]) <= 120
    assert lines[1].endswith("| 9.99 s | 98.8M tokens/s | MFU 41.5% | 43.6 days left")
    assert lines[2:] == [
        " text at iteration 5:",
        "   │ def f():",
        "   │ ",
        f"   │   a\\x1b{108 * 'b'}",
        "   │ bbbbbbbb",
    ]
    read, write = os.pipe()
    forked(report, stdout=f"/proc/{os.getpid()}/fd/{write}")
    logged, _, text = os.read(read, 10_000).decode().splitlines()
    assert " iteration        5/  500000 | consumed samples:           40 | elapsed time per iter" in logged
    assert text == f" text at iteration 5 | 'def f():\\n\\n  a\\x1b{116 * 'b'}' |"


def test_a_terminal_is_told_of_what_is_not_as_usual_first() -> None:
    odd = {**RECORD, "skipped": 2, "nan": 1, "mfu": None, "loss_scale": 65536.0, "elapsed_ms": 12_345.0}
    shown = " iteration 5/10 | loss 3.2500 | 2 skipped | 1 nan | norm 0.500 | lr 1.0e-03 | 12.35 s"
    assert terminal_line(odd, 10, 140) == f"{shown} | 12,345 tokens/s | 61.7 s left | scale 65536"
    assert terminal_line(odd, 10, len(shown)) == shown
