"""``/register_capture_file`` and ``/acknowledge_capture``: memory files for local clients.

Owns the registrations: each is an open reply, whose end is that of its client. ``capture_files``
has the files.
"""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dovetail.config.schema import EngineConfig
from dovetail.core.routes import Pieces
from dovetail.errors import RequestError
from dovetail.server.body import read_body
from dovetail.server.capture_files import DEFAULT_SLOTS, CaptureFolder, given
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import EventStream
from dovetail.wire.capture import FileSlot
from dovetail.wire.typed import typed


class RegisterBody(msgspec.Struct, frozen=True, kw_only=True):
    """How large a file is wanted.

    Attributes:
        num_slots: generations whose rows it can hold at once.
    """

    num_slots: int = DEFAULT_SLOTS


class AcknowledgeBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a client has read, or will not read.

    Attributes:
        capture_file: the name of its file.
        slots: as replies named them.
        rids: of requests whose replies it reads no more.
    """

    capture_file: str
    slots: tuple[FileSlot, ...] = ()
    rids: tuple[str, ...] = ()


class CaptureRoutes:
    """The routes over one folder of files; without it both refuse. Used on one event loop alone."""

    def __init__(
        self, config: EngineConfig, settings: ServerSettings, folder: CaptureFolder | None
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._config = config
        self._is_draining = asyncio.Event()

    def drain(self) -> None:
        """End all registrations."""
        self._is_draining.set()

    async def register(self, http: HttpRequest) -> EventStream:
        """Make a file, tell of it, and remove it when its client has gone."""
        body = typed((await read_body(http, self._settings)).fields, RegisterBody)
        return EventStream(self._registration(given(self._folder), body.num_slots))

    async def acknowledge(self, http: HttpRequest) -> Response:
        """Free slots that their client has read or does not want."""
        fields = (await read_body(http, self._settings)).fields
        body = typed(fields, AcknowledgeBody)
        if not fields.keys() & {"slots", "rids"}:
            raise RequestError("slots", "is missing; name slots that were read, or rids given up")
        file = given(self._folder).find(body.capture_file)
        file.free(body.slots)
        for rid in body.rids:
            file.give_up(rid)
        return Response(b"{}", media_type="application/json")

    async def _registration(
        self, folder: CaptureFolder, num_slots: int
    ) -> AsyncGenerator[Pieces, None]:
        columns, context_len = self._config.columns, self._config.context_len
        file = folder.register(
            num_slots, {name: spec.row_bytes * context_len for name, spec in columns.items()}
        )
        try:
            yield [msgspec.json.encode(file.info)]
            await self._is_draining.wait()
        finally:
            folder.end(file)
