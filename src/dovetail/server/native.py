"""``/generate`` and ``/abort_request`` in SGLang's native dialect.

Owns the routes; ``native_body`` has the reading of bodies and ``native_reply`` the replies.
"""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dovetail.core.client import EngineClient
from dovetail.core.generation import StreamEvent
from dovetail.core.reply import GrowingReply
from dovetail.core.routes import Pieces, json_of, msgpack_of
from dovetail.errors import RequestError
from dovetail.server.body import off_loop, read_body
from dovetail.server.capture_files import CaptureFolder, Handover, given
from dovetail.server.delivery import Delivery, delivery_of
from dovetail.server.errors import generation_error
from dovetail.server.native_body import Call, read_call, requests_of
from dovetail.server.native_reply import ReplyMaker, reply_size
from dovetail.server.reply_limit import check_listed
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import EventStream, WholeReply
from dovetail.server.traffic import Traffic
from dovetail.wire.request import Request
from dovetail.wire.typed import typed

JSON, MSGPACK = "application/json", "application/msgpack"
"""What a whole reply can be: msgpack has rows as raw bytes, for clients that accept it."""

_NEVER = re.compile(r"q=0(\.0*)?")


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """What to abort.

    Attributes:
        rid: label of the requests.
        abort_all: all that are open.
        prefix: ``rid`` is how the labels begin.
    """

    rid: str | None = None
    abort_all: bool = False
    prefix: bool = False


class NativeRoutes:
    """The native dialect over one engine.

    Args:
        client: of the engine.
        traffic: runs the requests.
        settings: of the server.
        folder: where clients' capture files are; None if the server has none.
    """

    def __init__(
        self,
        client: EngineClient,
        traffic: Traffic,
        settings: ServerSettings,
        folder: CaptureFolder | None,
    ) -> None:
        self._client = client
        self._traffic = traffic
        self._settings = settings
        self._folder = folder

    async def generate(self, http: HttpRequest) -> WholeReply | EventStream:
        """Generate for one prompt or many."""
        body = await read_body(http, self._settings)
        call, requests = await off_loop(body.num_bytes, lambda: self._read(body.fields))
        accept = http.headers.get("accept", "")
        handover, delivery = self._handover(call), delivery_of(http.scope)
        if call.stream:
            _check_streamed(accept)
            return EventStream(self._stream(call, requests, handover, delivery))
        kind = MSGPACK if _accepts(accept, MSGPACK) else JSON
        return WholeReply(self._answer(call, requests, kind, handover, delivery), kind)

    async def abort(self, http: HttpRequest) -> Response:
        """End requests early; each is answered with what it has. Unknown labels are no error."""
        body = typed((await read_body(http, self._settings)).fields, AbortBody)
        if body.abort_all:
            self._traffic.abort_all()
        elif body.rid:  # an empty one begins every label
            self._traffic.abort(body.rid, is_prefix=body.prefix)
        else:
            raise RequestError("rid", "is missing; give the rid of a request, or abort_all: true")
        return Response(b"{}", media_type="application/json")

    def _read(self, fields: dict[str, Any]) -> tuple[Call, list[Request]]:
        """Return the call and a request an item; nothing starts unless all are right."""
        call = read_call(fields, max_prompts=self._client.config.max_open)
        requests = requests_of(call, self._client.requests)
        check_listed(requests)
        return call, requests

    def _handover(self, call: Call) -> Handover:
        """Return what puts the call's rows into its client's file, if it names one."""
        if call.capture_file is None:
            return Handover(None)
        return Handover(given(self._folder).find(call.capture_file), call.rids)

    def _maker(self, call: Call, handover: Handover) -> ReplyMaker:
        return ReplyMaker(
            call,
            self._client.tokenizer,
            num_layers=self._client.config.model.num_layers,
            place=None if call.capture_file is None else handover.place,
        )

    async def _answer(
        self,
        call: Call,
        requests: list[Request],
        kind: str,
        handover: Handover,
        delivery: Delivery,
    ) -> AsyncGenerator[Pieces, None]:
        """Yield the one content of a whole reply."""
        started = time.perf_counter()
        answers = await self._traffic.finish(requests)
        seconds = time.perf_counter() - started
        maker = self._maker(call, handover)

        def encode() -> Pieces:
            replies = [
                maker.whole(index, request, generation)
                for index, (request, some) in enumerate(zip(requests, answers, strict=True))
                for generation in some
            ]
            for reply in replies:
                reply["meta_info"]["e2e_latency"] = seconds
            encode = msgpack_of if kind == MSGPACK else json_of
            return encode(replies if call.is_list else replies[0])

        if not call.is_list:
            reason = answers[0][0].finish_reason
            if reason.type == "error":
                raise generation_error(reason)
        try:
            yield await off_loop(reply_size(answers), encode)
            handover.sent(delivery)
        finally:
            handover.close()

    async def _stream(
        self, call: Call, requests: list[Request], handover: Handover, delivery: Delivery
    ) -> AsyncGenerator[Pieces, None]:
        """Yield the events' data."""
        started = time.perf_counter()
        replies: dict[tuple[int, int], GrowingReply] = {}
        first_of = [0]  # index of each item's first generation in the list that it would be
        for request in requests:
            first_of.append(first_of[-1] + request.sampling.n)
        maker = self._maker(call, handover)

        def encode(index: int, event: StreamEvent) -> Pieces:
            reply = replies[index, event.sample_index].add(event)
            reply["meta_info"]["e2e_latency"] = time.perf_counter() - started
            if call.is_list:
                reply["index"] = first_of[index] + event.sample_index
            return json_of(maker.completed(reply, requests[index]))

        try:
            async with aclosing(self._traffic.run(requests)) as all_news:
                async for index, event in all_news:
                    if (index, event.sample_index) not in replies:
                        replies[index, event.sample_index] = GrowingReply(
                            requests[index],
                            label=requests[index].label or "",
                            logprobs=call.items[index].logprobs,
                            text_of=maker.text_of,
                            routes=maker.routes,
                        )
                    num_bytes = sum(rows.nbytes for rows in event.captured.values())
                    yield await off_loop(num_bytes, partial(encode, index, event))
                    if delivery.has_failed:  # and what was sent last has been lost
                        return
                    handover.sent()  # of an event: a client may leave when it has read it
        finally:
            handover.close()


def _accepts(accept: str, kind: str) -> bool:
    """Whether an ``Accept`` header names a kind, and not to turn it down (RFC 9110, 12.5.1)."""
    for item in accept.lower().split(","):
        name, *params = (part.strip() for part in item.split(";"))
        if name == kind:
            return not any(_NEVER.fullmatch(param) for param in params)
    return False


def _check_streamed(accept: str) -> None:
    """Refuse a stream to a client that reads msgpack alone.

    Raises:
        RequestError: it is one.
    """
    if _accepts(accept, MSGPACK) and not any(kind in accept for kind in ("text/", "*/*")):
        raise RequestError(
            "stream",
            "a stream is server-sent events, which are text; leave out Accept: "
            f"{MSGPACK}, or stream",
        )
