"""``/generate`` and ``/abort_request`` in SGLang's native dialect.

Owns the routes; ``native_body`` has the reading of bodies and ``core.reply`` the reply objects.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dovetail.core.client import EngineClient
from dovetail.core.reply import GrowingReply, TextOf, generate_reply
from dovetail.core.routes import RoutesAsked
from dovetail.errors import RequestError
from dovetail.server.body import off_loop, read_body, typed
from dovetail.server.errors import HttpError
from dovetail.server.native_body import Call, read_call, renamed
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import EventStream, unless_gone
from dovetail.server.traffic import Traffic
from dovetail.wire.request import Request

_REPLY_BYTES_PER_TOKEN = 40
JSON, MSGPACK = "application/json", "application/msgpack"
"""What a whole reply can be: msgpack has rows as raw bytes, for clients that accept it."""


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
    """The native dialect over one engine."""

    def __init__(self, client: EngineClient, traffic: Traffic, settings: ServerSettings) -> None:
        self._client = client
        self._traffic = traffic
        self._settings = settings

    async def generate(self, http: HttpRequest) -> Response | EventStream:
        """Generate for one prompt or many."""
        body = await read_body(http, self._settings)
        call, requests = await off_loop(body.num_bytes, lambda: self._read(body.fields))
        if call.stream:
            return EventStream(self._stream(call, requests))
        kind = MSGPACK if MSGPACK in http.headers.get("accept", "") else JSON
        content = await unless_gone(http.receive, self._answer(call, requests, kind))
        return Response(content, media_type=kind)

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
        requests: list[Request] = []
        for index, item in enumerate(call.items):
            try:
                requests.append(
                    self._client.requests.make(
                        item.prompt,
                        item.sampling,
                        logprobs=item.logprobs,
                        capture=call.capture,
                        group=call.group,
                        priority=call.priority,
                        label=item.rid if item.rid is not None else uuid.uuid4().hex,
                        namespace=call.namespace,
                    )
                )
            except RequestError as own_error:
                error = renamed(own_error, call)
                where = f"in item {index} of the batch: " if call.is_batch else ""
                raise RequestError(error.field, where + error.message) from None
        return call, requests

    async def _answer(self, call: Call, requests: list[Request], kind: str) -> bytes:
        started = time.perf_counter()
        answers = await self._traffic.finish(requests)
        seconds = time.perf_counter() - started

        def encode() -> bytes:
            replies: list[dict[str, Any]] = []
            for item, request, generations in zip(call.items, requests, answers, strict=True):
                for generation in generations:
                    reply = generate_reply(
                        generation,
                        label=request.label or "",
                        logprobs=item.logprobs,
                        text_of=self._text_of(call),
                        routes=self._routes_asked(call),
                    )
                    if call.return_prompt_token_ids:
                        reply["prompt_token_ids"] = request.prompt_token_ids
                    reply["meta_info"]["e2e_latency"] = seconds
                    replies.append(reply)
            encode = msgspec.msgpack.encode if kind == MSGPACK else msgspec.json.encode
            return encode(replies if call.is_list else replies[0])

        if not call.is_list:
            reason = answers[0][0].finish_reason
            if reason.type == "error":
                raise HttpError(500, reason.message or "the generation failed")
        num_numbers = sum(
            len(g.token_ids) + len(g.prompt_logprobs) for some in answers for g in some
        )
        num_bytes = sum(g.captured_bytes for some in answers for g in some)
        return await off_loop(num_numbers * _REPLY_BYTES_PER_TOKEN + num_bytes, encode)

    async def _stream(self, call: Call, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        started = time.perf_counter()
        replies: dict[tuple[int, int], GrowingReply] = {}
        first_of = [0]  # index of each item's first generation in the list that it would be
        for request in requests:
            first_of.append(first_of[-1] + request.sampling.n)
        async with aclosing(self._traffic.run(requests)) as all_news:
            async for index, event in all_news:
                key = index, event.sample_index
                if key not in replies:
                    replies[key] = GrowingReply(
                        requests[index],
                        label=requests[index].label or "",
                        logprobs=call.items[index].logprobs,
                        text_of=self._text_of(call),
                        routes=self._routes_asked(call),
                    )
                reply = replies[key].add(event)
                if call.return_prompt_token_ids:
                    reply["prompt_token_ids"] = requests[index].prompt_token_ids
                reply["meta_info"]["e2e_latency"] = time.perf_counter() - started
                if call.is_list:
                    reply["index"] = first_of[index] + event.sample_index
                yield msgspec.json.encode(reply)

    def _routes_asked(self, call: Call) -> RoutesAsked | None:
        if not call.capture.columns:
            return None
        return RoutesAsked(
            sglang=call.return_routed_experts,
            own=call.wants_columns,
            num_layers=self._client.config.model.num_layers,
            start_len=call.capture.start_len,
        )

    def _text_of(self, call: Call) -> TextOf | None:
        if not call.return_text_in_logprobs:
            return None
        tokenizer = self._client.tokenizer
        return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
