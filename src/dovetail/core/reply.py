"""Generations as the reply object of SGLang's native ``/generate``, whole or as far as they are.

Owns the reply's shape. Strict JSON: what is no finite number (the logprob of an id that cannot be
drawn) is null. A logprob is a triple ``[logprob, token id, text]``; the text is null unless asked
for.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dovetail.core.generation import Generation, StreamEvent, prompt_columns, top_pairs
from dovetail.core.routes import RoutesAsked, routes_reply
from dovetail.wire.request import LogprobParams, Request
from dovetail.wire.result import FinishReason

Triple = list[float | int | str | None]
TextOf = Callable[[int], str]
"""Returns the text of one token id."""


def generate_reply(
    generation: Generation,
    *,
    label: str,
    logprobs: LogprobParams | None,
    text_of: TextOf | None = None,
    routes: RoutesAsked | None = None,
) -> dict[str, Any]:
    """Return the reply as plain values, and rows, for ``json_of`` and ``msgpack_of``.

    Args:
        generation: what to report.
        label: the request's id as the client knows it.
        logprobs: what the request asked for; None leaves all logprobs out.
        text_of: fills the third place of the triples; None leaves it null.
        routes: what the request asked for of captured columns; None leaves them out.
    """
    usage = generation.usage
    meta_info: dict[str, Any] = {
        "id": label,
        "finish_reason": finish_reason_of(generation.finish_reason, len(generation.token_ids)),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "num_retractions": usage.num_retractions,
        "weight_version": weight_version_of(generation.weight_versions),
        "sampling_seed": generation.seed,
    }
    if logprobs is not None:
        table = _Table(logprobs, text_of)
        meta_info |= table.output(
            generation.token_ids,
            generation.logprobs,
            generation.top_logprobs,
            generation.id_logprobs,
        ) | table.masks(generation.sampling_mask, generation.mask_logprobs)
        if logprobs.logprob_start_len >= 0:
            meta_info |= table.input(
                generation.prompt_token_ids,
                generation.prompt_logprobs,
                generation.prompt_top_logprobs,
                generation.prompt_id_logprobs,
            )
    meta_info |= routes_reply(
        routes,
        generation.captured,
        generation.routes,
        start=routes.start_len if routes else 0,
        total_len=len(generation.prompt_token_ids) + len(generation.token_ids),
    )
    return {
        "text": generation.text,
        "output_ids": list(generation.token_ids),
        "meta_info": meta_info,
    }


class GrowingReply:
    """The reply of one generation that still runs: each event makes it longer.

    Owns the columns as JSON, to which each event appends, so that an event costs what is new in it
    and one copy of the rest, however long the generation is. After the last event the reply is
    ``generate_reply`` of the same generation.

    Args:
        request: the request; it may have other generations.
        label, logprobs, text_of, routes: as for ``generate_reply``. Rows are not repeated: an event
            has those that are new in it.
    """

    def __init__(
        self,
        request: Request,
        *,
        label: str,
        logprobs: LogprobParams | None,
        text_of: TextOf | None = None,
        routes: RoutesAsked | None = None,
    ) -> None:
        self._routes = routes
        self._num_rows = 0
        self._request = request
        self._label = label
        self._logprobs = logprobs
        self._table = None if logprobs is None else _Table(logprobs, text_of)
        self._text = bytearray()
        self._output_ids = bytearray()
        self._columns: dict[str, bytearray] = {}
        self._num_tokens = 0
        self._version = "0"

    def add(self, event: StreamEvent) -> dict[str, Any]:
        """Return the reply up to and with the generation's next event; for ``json_of``."""
        self._text += msgspec.json.encode(event.text)[1:-1]
        _extend(self._output_ids, event.token_ids)
        self._num_tokens += len(event.token_ids)
        if event.weight_versions:
            self._version = weight_version_of(event.weight_versions)
        if self._table is not None:
            self._add_logprobs(self._table, event)
        return {
            "text": msgspec.Raw(b'"' + self._text + b'"'),
            "output_ids": _array(self._output_ids),
            "meta_info": self._meta_info(event)
            | self._new_rows(event)
            | {name: _array(column) for name, column in self._columns.items()},
        }

    def _add_logprobs(self, table: "_Table", event: StreamEvent) -> None:
        scores, prompt = event.scores, event.prompt_scores
        columns = table.output(
            event.token_ids,
            event.logprobs,
            top_pairs(scores) if scores else (),
            scores.id_logprobs if scores else (),
        ) | table.masks(
            scores.masks if scores else (),
            scores.mask_logprobs if scores else (),
        )
        start = table.asked.logprob_start_len
        # They come with the first token, or the end without one; rows may come before.
        are_there = bool(event.token_ids) or event.finish_reason is not None
        if start >= 0 and are_there and "input_token_logprobs" not in self._columns:
            prompt_token_ids = self._request.prompt_token_ids
            columns |= table.input(prompt_token_ids, *prompt_columns(self._request, prompt))
        for name, rows in columns.items():
            _extend(self._columns.setdefault(name, bytearray()), rows)

    def _new_rows(self, event: StreamEvent) -> dict[str, Any]:
        start = self._request.capture.start_len + self._num_rows
        self._num_rows += len(next(iter(event.captured.values()), ()))
        return routes_reply(
            self._routes,
            event.captured,
            event.routes,
            start=start,
            total_len=len(self._request.prompt_token_ids) + self._num_tokens,
        )

    def _meta_info(self, event: StreamEvent) -> dict[str, Any]:
        meta_info: dict[str, Any] = {
            "id": self._label,
            "finish_reason": None,
            "prompt_tokens": len(self._request.prompt_token_ids),
            "completion_tokens": self._num_tokens,
        }
        if event.finish_reason is not None and event.usage is not None:
            meta_info["finish_reason"] = finish_reason_of(event.finish_reason, self._num_tokens)
            meta_info["cached_tokens"] = event.usage.cached_tokens
            meta_info["num_retractions"] = event.usage.num_retractions
        meta_info["weight_version"] = self._version
        meta_info["sampling_seed"] = self._request.seed
        return meta_info


def finish_reason_of(reason: FinishReason, num_tokens: int) -> dict[str, Any]:
    """Return why a generation of ``num_tokens`` tokens ended."""
    match reason.type:
        case "stop":
            return {"type": "stop", "matched": reason.matched}
        case "length":
            return {"type": "length", "length": num_tokens}
        case _:
            param = {} if reason.field is None else {"param": reason.field}
            return {"type": reason.type, "message": reason.message} | param


def weight_version_of(versions: tuple[int, ...]) -> str:
    """Return the version that the last token was sampled with."""
    return str(versions[-1] if versions else 0)


class _Table:
    """The logprob columns of a reply: name -> a row a token."""

    def __init__(self, asked: LogprobParams, text_of: TextOf | None) -> None:
        self.asked = asked
        self._text_of = text_of

    def output(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        top: Iterable[Iterable[tuple[int, float]]],
        of_ids: Iterable[Iterable[float]],
    ) -> dict[str, list[Any]]:
        """Return the columns of generated tokens."""
        return self._columns("output", token_ids, logprobs, top, of_ids, ())

    def masks(
        self, masks: Iterable[Iterable[int]], logprobs: Iterable[float]
    ) -> dict[str, list[Any]]:
        """Return what each draw could have drawn, and the drawn token's logprob among it."""
        if not self.asked.sampling_mask:
            return {}
        return {
            "output_token_sampling_mask": [list(ids) for ids in masks],
            "output_token_sampling_logprobs": list(logprobs),
        }

    def input(
        self,
        prompt_token_ids: tuple[int, ...],
        logprobs: tuple[float | None, ...],
        top: Iterable[Iterable[tuple[int, float]]],
        of_ids: Iterable[Iterable[float]],
    ) -> dict[str, list[Any]]:
        """Return a row a prompt token from ``logprob_start_len`` on; position 0 has no logprob.

        No row at all if ``logprobs`` is empty: the prompt was not scored to its end.
        """
        start = self.asked.logprob_start_len
        token_ids = prompt_token_ids[start : start + len(logprobs)]
        nothing = (None,) if start == 0 and logprobs else ()
        return self._columns("input", token_ids, logprobs, top, of_ids, nothing)

    def _columns(
        self,
        side: str,
        token_ids: Iterable[int],
        logprobs: Iterable[float | None],
        top: Iterable[Iterable[tuple[int, float]]],
        of_ids: Iterable[Iterable[float]],
        nothing: tuple[None, ...],
    ) -> dict[str, list[Any]]:
        asked = self.asked
        pairs = zip(token_ids, logprobs, strict=True)
        columns: dict[str, list[Any]] = {f"{side}_token_logprobs": self._row(pairs)}
        if asked.top_logprobs_num:
            columns[f"{side}_top_logprobs"] = [*nothing, *(self._row(row) for row in top)]
        if asked.token_ids_logprob:
            ids = asked.token_ids_logprob
            columns[f"{side}_token_ids_logprobs"] = [
                *nothing,
                *(self._row(zip(ids, row, strict=True)) for row in of_ids),
            ]
        return columns

    def _row(self, pairs: Iterable[tuple[int, float | None]]) -> list[Triple]:
        text_of = self._text_of
        return [
            [
                logprob if logprob is not None and math.isfinite(logprob) else None,
                token_id,
                None if text_of is None else text_of(token_id),
            ]
            for token_id, logprob in pairs
        ]


def _extend(column: bytearray, rows: Iterable[Any]) -> None:
    added = msgspec.json.encode(rows)[1:-1]
    if column and added:
        column += b","
    column += added


def _array(column: bytearray) -> msgspec.Raw:
    return msgspec.Raw(b"[" + column + b"]")
