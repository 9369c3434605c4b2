"""What the endpoints of the server share: the model, room for requests, their time limit, growing texts."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from megatron_zpp.config.options import option_error
from megatron_zpp.generate.http_limits import Bodies, unavailable
from megatron_zpp.generate.scheduler import GenerationFailed, Job, Scheduler
from megatron_zpp.generate.server_options import ServerOptions
from megatron_zpp.generate.text import Continuation, Piece
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """A job has ended."""

    failure: GenerationFailed | None


class Service:
    """The model, and the requests that are worked on or wait for it."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: ServerOptions, name: str) -> None:
        self.model, self.tokenizer, self.options, self.name = model, tokenizer, options, name
        self.bodies = Bodies(options)
        self.scheduler = Scheduler(model, options.batch_size)
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        self._present = 0  # requests that are worked on or wait

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """A place for a request that has arrived. Raises HTTPServiceUnavailable if none is free."""
        if self._present >= self.options.batch_size + self.options.max_waiting:
            raise unavailable(f"{self._present} requests are here already")
        self._present += 1
        try:
            yield
        finally:
            self._present -= 1

    async def in_time(self, work: Awaitable[T], seconds: float | None = None) -> T:
        """Wait for work on a request, up to its time limit or what is left. Raises HTTPGatewayTimeout."""
        try:
            return await asyncio.wait_for(work, self.options.request_timeout if seconds is None else seconds)
        except asyncio.TimeoutError:
            raise web.HTTPGatewayTimeout(text=self.too_late) from None

    @property
    def too_late(self) -> str:
        """What a client is told whose request took too long."""
        seconds = self.options.request_timeout
        return f"not done within --request-timeout {seconds:g} s; ask for fewer tokens or prompts"

    async def parsed(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """`parse(body)` in a thread: a long text must not hold up the others. Raises HTTPBadRequest."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._parser, parse, body)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None

    def check_count(self, name: str, texts: int) -> None:
        """Refuse more texts than a request may ask for."""
        if texts > self.options.max_prompts:
            raise option_error(name, f"(list of {texts})", f"at most {self.options.max_prompts}")

    async def pieces(
        self, texts: Sequence[Continuation], *, stream: bool
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Write texts; with `stream` yield what becomes certain of each, and end when all have ended.

        Whoever leaves the iteration early, because its client has left for example, must close it: the texts
        are then forgotten. Raises GenerationFailed.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, Piece] | _End] = asyncio.Queue()

        def tell(item: tuple[int, Piece] | _End) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended in the meantime
                loop.call_soon_threadsafe(news.put_nowait, item)

        job = Job(
            texts,
            lambda failure: tell(_End(failure)),
            (lambda number, piece: tell((number, piece))) if stream else None,
        )
        self.scheduler.submit(job)
        try:
            while not isinstance(item := await news.get(), _End):
                yield item
            if item.failure is not None:
                raise item.failure
        finally:
            self.scheduler.cancel(job)

    async def write(self, texts: Sequence[Continuation]) -> None:
        """Write texts to their ends. Raises GenerationFailed."""
        async with contextlib.aclosing(self.pieces(texts, stream=False)) as pieces:
            async for _ in pieces:
                raise AssertionError("pieces were not asked for")

    def close(self) -> None:
        """Wait for the threads, which end at the next token."""
        self.scheduler.close()
        self._parser.shutdown(cancel_futures=True)
