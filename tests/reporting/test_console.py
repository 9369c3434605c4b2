"""What a person sees: Megatron-LM's line for scripts, and on a terminal a bar with loss and rate."""

import fcntl
import os
import re
import struct
import sys
import termios

import pytest

from megatron_zpp.reporting.console import Console, log_line

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


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The bar goes to stderr, so that a log of stdout contains only lines."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 150, 0, 0))  # rows and columns
    with open(slave, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        console = Console(iterations=10, done=4)
        console.step_done()
        console.log(RECORD)
        console.close()
    seen = "".join(iter(lambda: read_terminal(master), ""))
    os.close(master)
    assert re.search(r"training: +50%.* 5/10 .*loss 3\.2500, 12\.3k tokens/s, MFU 41\.5%", seen)
    assert capsys.readouterr().out.count("iteration        5/      10 |") == 1


def test_raised_units_are_in_the_line_of_runs_that_have_them() -> None:
    assert "raised units" not in log_line(RECORD, 10)
    assert "| raised units: 3 | tokens/s: 12345 |" in log_line({**RECORD, "raised_units": 3}, 10)


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture) -> None:
    console = Console(iterations=10, done=0)
    console.step_done()
    console.log({**RECORD, "mfu": None, "lm_loss": float("nan")})
    console.close()
    out, err = capsys.readouterr()
    assert err == ""
    assert "| lm loss: NAN |" in out  # Megatron-LM's line drops it
    assert "| MFU: n/a | time left: 0:00:01 |" in out
