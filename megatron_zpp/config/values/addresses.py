"""What programs need to meet over a network: HOST:PORT, and a file with a secret that they share."""

from pathlib import Path

from megatron_zpp.config.options import option_error


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. Raises ValueError for other text."""
    host, _, port = value.rpartition(":")
    if not host or ":" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise option_error(flag, value, "must be HOST:PORT, with an IPv4 address or a name, and 1 to 65535")
    return host, int(port)


def read_secret(flag: str, path: str) -> bytes:
    """Return the secret in a file, without white space around it. Raises ValueError if there is none."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise option_error(flag, path, f"{error.strerror}; name a file that can be read") from None
    if not secret:
        raise option_error(flag, path, "the file is empty; write a long random secret to it")
    return secret
