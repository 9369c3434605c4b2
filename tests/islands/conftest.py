"""A hub of islands in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, environment, free_port, wait_until

SECRET = "a secret of sixteen characters or more"


class Hub:
    """The program in a process of its own, which can be started again; `said` is what it has printed."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.address = directory, f"127.0.0.1:{free_port()}"
        (directory / "secret").write_text(SECRET)
        self.process: subprocess.Popen[str] | None = None

    def argv(self, *flags: str) -> list[str]:
        paths = ["--directory", str(self.directory / "log"), "--secret-file", str(self.directory / "secret")]
        return [
            "-m",
            "megatron_zpp",
            "islands",
            "--listen",
            self.address,
            *paths,
            "--names",
            "west",
            "east",
            *flags,
        ]

    def start(self, *flags: str) -> None:
        with (self.directory / "out").open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, *self.argv(*flags)], cwd=ROOT, env=environment(), stdout=out, stderr=out
            )
        before = self.said.count("listening")
        wait_until(lambda: self.said.count("listening") > before)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait()

    @property
    def said(self) -> str:
        return (self.directory / "out").read_text()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path)
    (tmp_path / "out").touch()
    yield hub
    hub.end(signal.SIGKILL)
    assert "Traceback" not in hub.said
