"""An asyncio front end of one engine, wherever that runs.

Owns the making of requests, with their ids, and the reading of events as text. Must not know
whether the loop runs in this process; imports no torch.
"""

import asyncio
import operator
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from pathlib import Path

from dovetail.config.schema import EngineConfig
from dovetail.core.cursor import Newsstand
from dovetail.core.generation import RequestDecoder, StreamEvent
from dovetail.core.port import EnginePort
from dovetail.core.prompts import RequestMaker
from dovetail.errors import RequestError
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.control import Abort, AbortGroup
from dovetail.wire.request import Request
from dovetail.wire.status import EngineStats, Health
from dovetail.wire.validate import Limits, validated_label


class EngineClient:
    """Requests and answers over an ``EnginePort``. Thread-safe; any number of event loops.

    Args:
        port: a running engine, of which this is the only client: it makes the request ids.
        tokenizer: of the engine's model; None reads it from the model's folder.

    Attributes:
        config: the engine's, as decided.
        tokenizer: of its model.
        requests: makes the requests that ``events`` takes.
    """

    def __init__(self, port: EnginePort, tokenizer: Tokenizer | None = None) -> None:
        folder = Path(port.config.model_folder)
        self._port = port
        self.config: EngineConfig = port.config
        self.tokenizer = tokenizer or Tokenizer.from_folder(port.config.tokenizer_folder)
        self.requests = RequestMaker(
            self.tokenizer,
            ChatTemplate.from_folder(folder, self.tokenizer),
            Limits(
                vocab_size=self.config.model.vocab_size,
                context_len=self.config.context_len,
                columns=tuple(self.config.columns),
            ),
        )
        self._newsstands: dict[asyncio.AbstractEventLoop, Newsstand] = {}

    async def events(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        """Run a request and yield its news; what a slow reader has missed comes as one event.

        The first step of the iterator starts the request. Closing the iterator, or cancelling the
        task that reads it, aborts the request.

        Raises:
            EngineClosed: the engine has been closed or has failed.
            CapacityError: as many generations run or wait as the engine takes on.
        """
        self._port.home.check()
        loop = asyncio.get_running_loop()
        newsstand = self._newsstands.get(loop)
        if newsstand is None:
            newsstand = self._newsstands[loop] = Newsstand(loop, partial(self._leave, loop))
        decoder = self.decoder(request)
        cursor = newsstand.open(request.request_id)
        try:
            self._port.start(request, newsstand.deliver)
            try:
                while not decoder.is_done:
                    self._port.home.check()
                    for event in await cursor.take():
                        yield decoder.decode(event)
            finally:
                if not decoder.is_done:
                    self.abort(request.request_id)
        finally:
            if self._port.home.failure is None:  # else nobody may be left to free its lock
                newsstand.drop(request.request_id)
                if newsstand.is_empty:
                    self._newsstands.pop(loop, None)

    def decoder(self, request: Request) -> RequestDecoder:
        """Return what makes text of the request's events."""
        return RequestDecoder(request, self.tokenizer, self.config.model)

    def abort(self, request_id: int) -> None:
        """End a request early; it gets its last event with reason ``abort``.

        An id that is unknown or has ended is no error.
        """
        self._port.send(Abort(operator.index(request_id)))  # a wrong type fails here, not there

    def abort_group(self, group: str) -> None:
        """End all open requests that carry this label."""
        label = validated_label("group", group)
        if label is None:
            raise RequestError("group", "is None; give a text")
        self._port.send(AbortGroup(label))

    def stats(self) -> EngineStats:
        """Return the engine's counts; see the port."""
        return self._port.stats()

    def health(self) -> Health:
        """Say whether the engine can answer."""
        return self._port.health()

    def close(self) -> None:
        """End the engine; waits, so call it off the event loop. May be called twice."""
        self._port.close()

    def _leave(self, loop: asyncio.AbstractEventLoop, request_ids: Iterable[int]) -> None:
        self._newsstands.pop(loop, None)
        for request_id in request_ids:
            self.abort(request_id)
