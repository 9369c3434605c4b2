"""What programs need to meet over a network: HOST:PORT, and a file with a secret that they share."""

import re
from pathlib import Path

from megatron_zpp.config.options import option_error

_SHORTEST = 16  # characters of a secret


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """Return both parts of HOST:PORT, where an IPv6 address has brackets. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([^][]+)\]|([^:]+)):([0-9]{1,5})", value)
    if not found or int(found[3]) >= 2**16:
        raise option_error(flag, value, "must be HOST:PORT, such as 10.0.0.1:29600")
    return found[1] or found[2], int(found[3])


def joined(host: str, port: int) -> str:
    """HOST:PORT, as `host_and_port` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_secret(flag: str, path: str) -> bytes:
    """Return the secret in a file, without white space around it. Raises ValueError if there is none."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise option_error(flag, path, f"{error.strerror}; name a file that can be read") from None
    if len(secret) < _SHORTEST:
        fix = f"must hold {_SHORTEST} characters or more; openssl rand -hex 32 makes some"
        raise option_error(flag, path, fix)
    return secret
