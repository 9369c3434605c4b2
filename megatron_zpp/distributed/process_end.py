"""How another process of this host has ended, from what the kernel keeps until its parent asks for it."""

import os
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_STATE, _STARTED, _STATUS = 0, 19, 49  # proc(5): fields 3, 22 and 52 of /proc/PID/stat
_CREDENTIALS = struct.Struct("3i")  # unix(7): SO_PEERCRED
_NAMES = {number.value: number.name for number in signal.Signals}  # real-time signals have none
_REQUESTS = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "status 130")  # ends that several ranks have at once


@dataclass(frozen=True)
class OtherProcess:
    """A process that this one can see; process ids are reused, so the time when it started belongs to it."""

    pid: int
    started: str

    @classmethod
    def at_other_end(cls, connection: socket.socket) -> "OtherProcess | None":
        """The process that connected a Unix socket, or listens on it; None if this process cannot see it."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        fields = _fields(pid)
        return cls(pid, fields[_STARTED]) if pid and fields else None

    def end(self) -> str | None:
        """What ended it, such as `SIGKILL` or `status 1`; None if that is not known, or no longer."""
        fields = _fields(self.pid)
        if fields is None or fields[_STARTED] != self.started:
            return None
        status = os.waitstatus_to_exitcode(int(fields[_STATUS]))
        if status < 0:
            return _NAMES.get(-status, f"SIG{-status}")
        # While a process ends, status 0 is also that of one whose status is not known yet.
        return f"status {status}" if status or fields[_STATE] == "Z" else None


def is_request(end: str | None) -> bool:
    """Whether an end may be what a person or a launcher has asked of all ranks at once; None: unknown."""
    return end is None or end in _REQUESTS


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name; None if there is no such process, or some are missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > _STATUS else None
