"""From requests to OpenAI's reply objects, whole or as events.

Owns what both routes share: the envelope, usage, and the order of events. A route's ``Choices``
says how one choice looks.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.core.generation import Generation, StreamEvent
from dovetail.core.routes import Pieces, json_of, sglang_rows
from dovetail.replay.records import RouteTrace
from dovetail.server.body import off_loop
from dovetail.server.errors import generation_error
from dovetail.server.openai.body import CallFields, StreamOptions
from dovetail.server.traffic import Traffic
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason

_CHOICE_BYTES_PER_TOKEN = 120

Rows = NDArray[np.int32]
"""Expert rows in SGLang's form."""


class Choices(Protocol):
    """How a route shows one generation. One object a call: it may keep state per choice."""

    id_prefix: str
    kind: str
    part_kind: str

    def whole(
        self, key: tuple[int, int], request: Request, generation: Generation
    ) -> dict[str, Any]:
        """Return choice ``key`` (request, sample) without its index and finish reason."""
        ...

    def part(self, key: tuple[int, int], request: Request, event: StreamEvent) -> dict[str, Any]:
        """Return what an event adds to choice ``key``; empty if nothing, but never at its end."""
        ...


class Answers:
    """The replies of one call.

    Args:
        call: the fields that both routes share.
        model: the served name.
        requests: of the prompts, in order; choices are numbered prompt by prompt.
        choices: of the route.
        num_layers: of the model, dense ones included.
    """

    def __init__(
        self,
        call: CallFields,
        model: str,
        requests: Sequence[Request],
        choices: Choices,
        *,
        num_layers: int,
    ) -> None:
        self._num_layers = num_layers
        self._requests = requests
        self._choices = choices
        self._options = call.stream_options or StreamOptions()
        self._first_of = [0]  # index of each request's first choice
        for request in requests:
            self._first_of.append(self._first_of[-1] + request.sampling.n)
        self._head = {
            "id": f"{choices.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, traffic: Traffic) -> AsyncGenerator[Pieces, None]:
        """Run the requests to their end and yield the reply.

        Raises:
            HttpError: a generation failed.
        """
        answers = await traffic.finish(self._requests)
        size = sum(
            (len(g.token_ids) + len(g.prompt_logprobs)) * _CHOICE_BYTES_PER_TOKEN + g.captured_bytes
            for some in answers
            for g in some
        )
        yield await off_loop(size, lambda: self._encode(answers))

    async def stream(self, traffic: Traffic) -> AsyncGenerator[Pieces, None]:
        """Run the requests and yield the events' data."""
        usage = _RunningUsage(self._requests)
        num_tokens: dict[int, int] = {}
        async with aclosing(traffic.run(self._requests)) as all_news:
            async for index, event in all_news:
                usage.add(index, event)
                place = self._first_of[index] + event.sample_index
                num_tokens[place] = num_tokens.get(place, 0) + len(event.token_ids)
                request = self._requests[index]
                choice = self._choices.part((index, event.sample_index), request, event)
                if not choice:
                    continue
                whole = _choice(place, choice, event.finish_reason)
                size = 0 if event.routes is None else event.routes.ids.nbytes
                news = place, whole, request, event.routes, num_tokens[place], usage
                yield await off_loop(size, partial(self._part, *news))
        if self._options.include_usage:
            yield self._event([], usage)

    def _part(
        self,
        place: int,
        choice: dict[str, Any],
        request: Request,
        routes: RouteTrace | None,
        num_tokens: int,
        usage: "_RunningUsage",
    ) -> Pieces:
        """Return the data of an event of one choice, with its rows if it has ended."""
        rows = self._rows(request, routes, num_tokens)
        return self._event([choice | _meta_of(rows)], usage, rows if place == 0 else None)

    def _rows(self, request: Request, routes: RouteTrace | None, num_tokens: int) -> Rows | None:
        """Return the expert rows of a generation that has ended, if it has them all."""
        if routes is None:
            return None
        return sglang_rows(
            routes,
            num_layers=self._num_layers,
            total_len=len(request.prompt_token_ids) + num_tokens,
        )

    def _event(
        self, choices: list[dict[str, Any]], usage: "_RunningUsage", rows: Rows | None = None
    ) -> Pieces:
        event = {"object": self._choices.part_kind} | self._head | {"choices": choices}
        event |= _extension_of(rows)
        if self._options.include_usage or self._options.continuous_usage_stats:
            is_told = self._options.continuous_usage_stats or not choices
            event["usage"] = usage.value() if is_told else None
        return json_of(event)

    def _encode(self, answers: list[list[Generation]]) -> Pieces:
        choices: list[dict[str, Any]] = []
        usage = _RunningUsage(self._requests)
        versions: list[str] = []
        first_rows: Rows | None = None
        for index, (request, generations) in enumerate(zip(self._requests, answers, strict=True)):
            for generation in generations:
                place = self._first_of[index] + generation.sample_index
                choice = self._choices.whole((index, generation.sample_index), request, generation)
                rows = self._rows(request, generation.routes, len(generation.token_ids))
                first_rows = rows if place == 0 else first_rows
                choices.append(_choice(place, choice, generation.finish_reason) | _meta_of(rows))
                usage.count(
                    index, generation.usage.completion_tokens, generation.usage.cached_tokens
                )
                versions += [str(version) for version in generation.weight_versions[-1:]]
        return json_of(
            {"object": self._choices.kind}
            | self._head
            | {
                "choices": choices,
                "usage": usage.value(),
                "metadata": {"weight_version": versions[-1] if versions else "0"},
            }
            | _extension_of(first_rows)
        )


class _RunningUsage:
    """Token counts of a call so far; a prompt counts once, whatever its ``n``."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt = sum(len(request.prompt_token_ids) for request in requests)
        self._num_generated = 0
        self._num_cached = [0] * len(requests)

    def add(self, index: int, event: StreamEvent) -> None:
        """Count an event of request ``index``."""
        self.count(index, len(event.token_ids), event.usage.cached_tokens if event.usage else 0)

    def count(self, index: int, num_generated: int, num_cached: int) -> None:
        """Count tokens of request ``index``; of its samples' cached tokens the most counts."""
        self._num_generated += num_generated
        self._num_cached[index] = max(self._num_cached[index], num_cached)

    def value(self) -> dict[str, Any]:
        """Return the usage object."""
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": self._num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }


def _meta_of(rows: Rows | None) -> dict[str, Any]:
    return {} if rows is None else {"meta_info": {"routed_experts": rows}}


def _extension_of(rows: Rows | None) -> dict[str, Any]:
    """Return SGLang's extension of a reply, which has room for one choice's rows: the first's."""
    return {} if rows is None else {"sglext": {"routed_experts": rows}}


def _choice(index: int, choice: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    """Return the choice with its index and its end.

    Raises:
        HttpError: the generation failed.
    """
    if reason is not None and reason.type == "error":
        raise generation_error(reason)
    return {
        "index": index,
        **choice,
        "finish_reason": None if reason is None else reason.type,
        "matched_stop": None if reason is None else reason.matched,
    }
