"""The requests that are open at this server.

Owns the labels by which clients may abort them, and the counting. Runs one request or many as one
stream of news. Must not know any dialect.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from dovetail.core.client import EngineClient
from dovetail.core.generation import Generation, StreamEvent, collect
from dovetail.errors import CapacityError, EngineClosed, RequestError
from dovetail.server.metrics import Metrics
from dovetail.wire.request import Request


class News(NamedTuple):
    """One event of one of several requests.

    Attributes:
        place: which of the requests.
        event: what is new.
    """

    place: int
    event: StreamEvent


class Traffic:
    """Runs requests for the routes. Used on one event loop alone.

    Labels are never keys: two open requests may share one, and an abort by it ends both.
    """

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._labels: dict[int, str] = {}  # of the open requests
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """True once the server is ending: nothing new starts."""
        return self._is_draining

    def drain(self) -> None:
        """Start nothing more; what is open is the engine's to end."""
        self._is_draining = True

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[News, None]:
        """Run requests together and yield their news; closing it aborts what is open.

        Raises:
            CapacityError, EngineClosed: the requests cannot run; none is left running.
            RequestError: together they are more than the engine ever takes on.
        """
        if self._is_draining:
            raise EngineClosed("the server is ending; send the request to another")
        num_samples, most = sum(r.sampling.n for r in requests), self._client.config.max_open
        if num_samples > most:
            raise RequestError(
                "body",
                f"asks for {num_samples} generations, prompts times n; send at most {most} at once",
            )
        if len(requests) == 1:
            async with aclosing(self._run_one(requests[0])) as events:
                async for event in events:
                    yield News(0, event)
            return
        # As many places as readers: who has no place leaves the news where it is kept short.
        news: asyncio.Queue[News | Exception | None] = asyncio.Queue(maxsize=len(requests))
        readers = [
            asyncio.create_task(self._read(index, request, news))
            for index, request in enumerate(requests)
        ]
        try:
            num_open = len(readers)
            while num_open:
                match await news.get():
                    case News() as one:
                        yield one
                    case None:
                        num_open -= 1
                    case Exception() as error:
                        raise error
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def finish(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Run requests to their end; return the generations of each."""
        parts: list[list[StreamEvent]] = [[] for _ in requests]
        async with aclosing(self.run(requests)) as all_news:
            async for news in all_news:
                parts[news.place].append(news.event)
        return [collect(*pair) for pair in zip(requests, parts, strict=True)]

    def abort(self, label: str, *, is_prefix: bool = False) -> None:
        """End the open requests with this label, or with one that begins so. None is no error."""
        for request_id, own in list(self._labels.items()):
            if own == label or (is_prefix and own.startswith(label)):
                self._client.abort(request_id)

    def abort_all(self) -> None:
        """End all open requests."""
        for request_id in list(self._labels):
            self._client.abort(request_id)

    async def _read(
        self, index: int, request: Request, news: "asyncio.Queue[News | Exception | None]"
    ) -> None:
        try:
            async with aclosing(self._run_one(request)) as events:
                async for event in events:
                    await news.put(News(index, event))
        except Exception as error:  # whatever it is, the one who reads the news must know
            await news.put(error)
        else:
            await news.put(None)

    async def _run_one(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        started, has_token, num_open = time.perf_counter(), False, request.sampling.n
        num_prompt = len(request.prompt_token_ids)
        self._labels[request.request_id] = request.label or ""
        try:
            async with aclosing(self._client.events(request)) as events:
                async for event in events:
                    if event.token_ids and not has_token:
                        has_token = True
                        self._metrics.first_token(time.perf_counter() - started)
                    self._metrics.generated(len(event.token_ids))
                    if event.finish_reason is not None:
                        num_open -= 1
                        self._metrics.finished(
                            event.finish_reason.type, time.perf_counter() - started
                        )
                    yield event
        except CapacityError:
            num_prompt = num_open = 0  # it never was a request of the engine's
            raise
        finally:
            del self._labels[request.request_id]
            self._metrics.ended(num_prompt, num_abandoned=num_open)
