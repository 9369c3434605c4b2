"""--nccl-sockets: how many threads and sockets each of NCCL's TCP connections has."""

import re

from megatron_zpp.config.options import option_error

FLAG = "--nccl-sockets"
MOST_THREADS, MOST_SOCKETS = 16, 64  # NCCL's limits per connection: src/transport/net_socket.cc


def explicit_sockets(value: str) -> tuple[int, int] | None:
    """Threads, and sockets per thread, of a value TxS; None for auto and off.

    Raises ValueError for other values, and for more than NCCL's limits.
    """
    if value in ("auto", "off"):
        return None
    if not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", value):
        raise option_error(FLAG, value, "must be auto, off or THREADSxSOCKETS, such as 2x2")
    threads, per_thread = map(int, value.split("x"))
    if threads > MOST_THREADS:
        fix = f"NCCL has at most {MOST_THREADS} threads per connection; give {MOST_THREADS}x1 or less"
        raise option_error(FLAG, value, fix)
    if threads * per_thread > MOST_SOCKETS:
        raise option_error(
            FLAG,
            value,
            f"makes {threads * per_thread} sockets per connection, and NCCL has at most {MOST_SOCKETS}; "
            f"give {threads}x{MOST_SOCKETS // threads} or less",
        )
    return threads, per_thread
