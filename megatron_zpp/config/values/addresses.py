"""Flags that name an address of a network: HOST:PORT."""

from megatron_zpp.config.options import option_error


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. Raises ValueError for other text."""
    host, _, port = value.rpartition(":")
    if not host or ":" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise option_error(flag, value, "must be HOST:PORT, with an IPv4 address or a name, and 1 to 65535")
    return host, int(port)
