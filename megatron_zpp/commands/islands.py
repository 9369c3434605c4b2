"""Runs the hub through which islands exchange weights: `megatron-zpp islands --listen HOST:PORT ...`.

Islands are jobs of their own that train one model. The hub needs no GPU, and a disk for the exchanges that it
keeps. It runs until SIGTERM or Ctrl-C, and continues when it is started again on its directory.
"""

import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.command_line import command_options
from megatron_zpp.config.options import REQUIRED, Options, count, option, option_error
from megatron_zpp.config.values.addresses import host_and_port, joined, read_secret
from megatron_zpp.distributed.open_files import raise_limit
from megatron_zpp.islands.hub import Hub
from megatron_zpp.islands.log import OuterLog


@dataclass(frozen=True, kw_only=True)
class HubConfig(Options):
    """islands: the hub of islands"""

    listen: str = option(REQUIRED, "Address for the islands, as HOST:PORT; port 0 takes a free one.")
    directory: str = option(REQUIRED, "Where to keep outer steps; the same when the hub is started again.")
    secret_file: str = option(REQUIRED, "File with the secret that all islands have as --island-secret.")
    names: tuple[str, ...] = option(REQUIRED, "Names of all islands, at least two.")
    wait: float = option(
        60.0, "Seconds that an outer step waits, after its first island, for others.", at_least=0
    )
    quorum: int = count(1, "Islands without which no outer step is closed, however long it takes.")
    keep: int = count(100, "Newest outer steps to keep, for islands that were away.")

    def check(self) -> None:
        """Refuse names that are not those of different files, and a quorum that is never there."""
        if len(self.names) < 2 or len({*self.names}) < len(self.names):
            raise self.error("names", "must be at least two different names")
        if not all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in self.names):
            raise self.error("names", "must have only letters, digits, - and _, at most 64")
        if self.quorum > len(self.names):
            raise self.error("quorum", f"must be at most {len(self.names)}, the number of --names")


def main() -> None:
    """Run the hub until a signal ends it."""
    config = command_options(HubConfig, __doc__)
    host, port = host_and_port("--listen", config.listen)
    secret = read_secret("--secret-file", config.secret_file)
    log = OuterLog(Path(config.directory), config.names, config.keep)
    hub = Hub(log, config.names, wait=config.wait, quorum=config.quorum, say=_say)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        fix = f"{error.strerror}; give an address of this machine and a free port"
        raise option_error("--listen", config.listen, fix) from None
    raise_limit()  # each connection has two
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    newest = "no outer step yet" if log.newest is None else f"the newest outer step is {log.newest}"
    _say(f"listening at {joined(host, listener.getsockname()[1])}; {newest}")
    hub.serve(listener, secret)


def _say(line: str) -> None:
    print(f"{time.strftime('[%Y-%m-%d %H:%M:%S]')} {line}\n", end="", flush=True)  # whole lines of any thread
