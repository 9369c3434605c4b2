"""The progress of a long step, on a terminal and in a log file."""

import io

from megatron_zpp.data.corpus.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_from_time_to_time() -> None:
    log = io.StringIO()
    with Progress("step", 1000, every=100, stream=log) as progress:
        for _ in range(10):
            progress.advance(disk_bytes=50, text_bytes=2_000_000, documents=30)
    lines = log.getvalue().splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        "step: 120 documents",
        "step: 210 documents",
        "step: 300 documents",
    ]
    assert all("MB/s" in line and "documents/s" in line and "left" in line for line in lines)


def test_a_terminal_gets_a_bar() -> None:
    screen = Terminal()
    with Progress("step", 1000, every=1, stream=screen) as progress:
        progress.advance(disk_bytes=1000, text_bytes=2_000_000, documents=30)
        progress.say("a line")
    shown = screen.getvalue()
    assert "100%" in shown
    assert "documents/s" in shown
    assert "a line\n" in shown


def test_an_input_of_unknown_size_has_rates_without_a_share() -> None:
    screen = Terminal()
    with Progress("step", None, every=1, stream=screen) as progress:
        progress.advance(disk_bytes=0, text_bytes=2_000_000, documents=30)
    assert "documents/s" in screen.getvalue()
    assert "%" not in screen.getvalue()
