"""What protects the server from its clients: which requests are received, in which time and size."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from aiohttp import web

from megatron_zpp.config.options import printable
from megatron_zpp.generate.server_options import ServerOptions

_MOST_BODIES = 256  # that are received at a time: each is held in memory, up to --max-request-bytes
_EVERY_ADDRESS = ("0.0.0.0", "::")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\]]+)(:\d+)?")  # RFC 9110, 7.2
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Bodies:
    """Receives the bodies of requests. Slow senders delay nobody but themselves."""

    def __init__(self, options: ServerOptions) -> None:
        self._seconds = options.body_timeout
        self._arriving = 0

    async def receive(self, http: web.Request) -> bytes:
        """All of a body; its size is the application's to limit. Raises HTTP errors 415, 503 and 408."""
        encoding = http.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise web.HTTPUnsupportedMediaType(
                text=printable(f"Content-Encoding {encoding[:40]}: send the request as it is, not compressed")
            )
        if self._arriving >= _MOST_BODIES:
            raise unavailable(f"{self._arriving} requests are arriving already")
        self._arriving += 1
        try:
            return await asyncio.wait_for(http.read(), self._seconds)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"the request has not arrived within --body-timeout {self._seconds:g} s"
            ) from None
        finally:
            self._arriving -= 1


class AllowedHosts:
    """Refuses requests that are addressed to another server.

    A page in a user's browser can make its own host name resolve to 127.0.0.1 (DNS rebinding), and so talk to
    this server as if it were the page's own. The Host line says which name the client used.
    """

    def __init__(self, host: str, more: tuple[str, ...]) -> None:
        self._names = {_bare(name) for name in (*_LOOPBACK, host, *more)}
        self._addresses = host in _EVERY_ADDRESS  # numeric ones, which nobody can redirect

    @web.middleware
    async def check(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise HTTPForbidden unless the Host line has an allowed name."""
        given = http.headers.get("Host", "")
        match = _HOST.fullmatch(given)
        name = _bare(match["name"]) if match else ""
        if name in self._names or (self._addresses and _is_address(name)):
            return await handler(http)
        shown = printable(given[:100]) or "(not given)"
        raise web.HTTPForbidden(text=f"Host {shown}: is not this server; --allowed-hosts adds names")


def require_json(http: web.Request) -> None:
    """Raise HTTPUnsupportedMediaType unless the request says that it is JSON.

    A page of another site can make a browser POST plain text to this server, but JSON only with its consent.
    """
    if http.content_type != "application/json":
        given = printable(http.headers.get("Content-Type", "(not given)")[:80])
        raise web.HTTPUnsupportedMediaType(text=f"Content-Type {given}: send application/json")


def unavailable(why: str) -> web.HTTPServiceUnavailable:
    """The refusal of a request for which there is no room now."""
    return web.HTTPServiceUnavailable(text=f"{why}; try again later", headers={"Retry-After": "1"})


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
