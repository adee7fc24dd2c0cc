"""What users of the in-process engine get: stream events and generations.

Owns how token events become text. A ``Generation`` is the sum of its stream events,
so the streamed and the whole answer cannot differ.
"""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dovetail.config.model import ModelConfig
from dovetail.replay.records import RouteTrace
from dovetail.text.stream import Detokenizer
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, Scores, TokenEvent, Usage

Captured = dict[str, NDArray[np.generic]]
TopPairs = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """News of one generation.

    Attributes:
        request_id: the engine's id; ``Engine.abort`` takes it.
        sample_index: which of the request's ``n`` generations.
        text: text that has become certain; it may lag behind ``token_ids`` while a
            character or a possible stop string is incomplete.
        token_ids, logprobs, weight_versions: one entry per new token.
        scores: for a request that asks, one entry per new token.
        prompt_scores: for a request that asks, with its first token, or its end.
        finish_reason, usage: set in the generation's last event only.
        captured: column name -> rows that have become known; in the last event only, unless the
            request has a ``CaptureParams.interval``.
        routes: set in the last event only; see ``Generation``.
    """

    request_id: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    captured: Captured = field(default_factory=dict[str, NDArray[np.generic]])
    routes: RouteTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished generation.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        sample_index: which of the request's ``n`` generations.
        token_ids: generated ids; a matched stop id is the last one.
        text: of ``token_ids``, cut before a matched stop.
        finish_reason: why it ended; ``type`` is stop, length, abort or error.
        logprobs: natural log of each token's probability, of the kind that the
            request's ``LogprobParams`` name.
        top_logprobs: for each token, if asked for, the likeliest (id, logprob).
        id_logprobs: for each token, if asked for, logprobs of ``token_ids_logprob``.
        sampling_mask: for each token, if asked for, the ids that its draw could have drawn,
            ascending; none for a draw that truncation cut nothing off.
        mask_logprobs: of each token among those.
        prompt_logprobs: of the prompt from ``logprob_start_len`` on, None for position 0;
            empty if not asked for, or if it ended before the prompt was scored.
        prompt_top_logprobs, prompt_id_logprobs: the same for prompt positions, from
            position 1 on at the earliest.
        weight_versions: weights version of the forward that sampled each token.
        seed: the seed that was used; give it back to draw the same tokens again.
        usage: token counts.
        captured: column name -> array over the forwarded positions from the request's
            ``start_len`` on: prompt and output but the last token, which was no input; all of the
            prompt if nothing was generated.
        routes: the experts of those positions, if ``experts`` was captured.
    """

    prompt_token_ids: tuple[int, ...]
    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    id_logprobs: tuple[tuple[float, ...], ...]
    prompt_logprobs: tuple[float | None, ...]
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    prompt_id_logprobs: tuple[tuple[float, ...], ...]
    weight_versions: tuple[int, ...]
    seed: int
    usage: Usage
    captured: Captured
    routes: RouteTrace | None = None
    sampling_mask: tuple[tuple[int, ...], ...] = ()
    mask_logprobs: tuple[float, ...] = ()

    @property
    def captured_bytes(self) -> int:
        """Bytes of the captured columns."""
        return sum(rows.nbytes for rows in self.captured.values())


class RequestDecoder:
    """Turns the token events of one request into stream events and, in the end, generations."""

    def __init__(self, request: Request, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self._request = request
        self._detokenizers = [
            Detokenizer(tokenizer, request.sampling, eos_token_ids=model.eos_token_ids)
            for _ in range(request.sampling.n)
        ]
        self._routes = [_Routes(request, model) for _ in range(request.sampling.n)]
        self._num_open = request.sampling.n

    @property
    def is_done(self) -> bool:
        """True once each generation has had its last event."""
        return self._num_open == 0

    def decode(self, event: TokenEvent) -> StreamEvent:
        """Return the event with the text that it makes certain."""
        detokenizer = self._detokenizers[event.sample_index]
        text = detokenizer.push(event.token_ids)
        if event.finish is not None:
            text += detokenizer.finish(event.finish)
            self._num_open -= 1
        captured = {name: part.rows.unpack() for name, part in (event.captured or {}).items()}
        return StreamEvent(
            request_id=event.request_id,
            sample_index=event.sample_index,
            text=text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            weight_versions=event.epochs,
            scores=event.scores,
            prompt_scores=event.prompt_scores,
            finish_reason=event.finish,
            usage=event.usage,
            captured=captured,
            routes=self._routes[event.sample_index].add(event, captured),
        )


class _Routes:
    """The expert rows of one generation, as they come."""

    def __init__(self, request: Request, model: ModelConfig) -> None:
        self._start, self._moe = request.capture.start_len, model.moe
        self._is_asked = "experts" in request.capture.columns
        self._token_ids = list(request.prompt_token_ids) if self._is_asked else []
        self._parts: list[NDArray[np.generic]] = []

    def add(self, event: TokenEvent, captured: Captured) -> RouteTrace | None:
        """Take what an event brings; return all rows if it is the last one and has rows.

        The last event of a generation with a missing row has none.
        """
        if not self._is_asked:
            return None
        self._token_ids += event.token_ids
        if event.captured is None:
            return None
        self._parts.append(captured["experts"])
        if event.finish is None:
            return None
        assert self._moe is not None
        return RouteTrace.of_tokens(
            self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts),
            self._token_ids,
            layer_ids=self._moe.layer_ids,
            num_experts=self._moe.num_experts,
            start=self._start,
            spans=event.captured["experts"].spans,
        )


def collect(request: Request, events: list[StreamEvent]) -> list[Generation]:
    """Return the generations that a request's stream events add up to, by sample index."""
    samples: list[list[StreamEvent]] = [[] for _ in range(request.sampling.n)]
    for event in events:
        samples[event.sample_index].append(event)
    return [_generation(request, parts) for parts in samples]


def _generation(request: Request, parts: list[StreamEvent]) -> Generation:
    last = parts[-1]
    assert last.finish_reason is not None and last.usage is not None
    scores = [part.scores for part in parts if part.scores is not None]
    [prompt] = [part.prompt_scores for part in parts if part.prompt_scores is not None] or [None]
    prompt_logprobs, prompt_top, prompt_of_ids = prompt_columns(request, prompt)
    return Generation(
        prompt_token_ids=request.prompt_token_ids,
        sample_index=last.sample_index,
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        text="".join(part.text for part in parts),
        finish_reason=last.finish_reason,
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        top_logprobs=tuple(row for part in scores for row in top_pairs(part)),
        id_logprobs=tuple(row for part in scores for row in part.id_logprobs),
        prompt_logprobs=prompt_logprobs,
        prompt_top_logprobs=prompt_top,
        prompt_id_logprobs=prompt_of_ids,
        weight_versions=tuple(chain.from_iterable(part.weight_versions for part in parts)),
        seed=request.seed,
        usage=last.usage,
        captured=_joined([part.captured for part in parts if part.captured]),
        routes=last.routes,
        sampling_mask=tuple(row for part in scores for row in part.masks),
        mask_logprobs=tuple(value for part in scores for value in part.mask_logprobs),
    )


def _joined(parts: list[Captured]) -> Captured:
    if len(parts) < 2:
        return parts[0] if parts else {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def prompt_columns(
    request: Request, scores: Scores | None
) -> tuple[tuple[float | None, ...], TopPairs, tuple[tuple[float, ...], ...]]:
    """Return the prompt's logprobs, top pairs and logprobs of ids, as ``Generation`` has them.

    All or none: who is aborted in its prompt has been scored up to some chunk, which says nothing.
    """
    start = request.logprobs.logprob_start_len
    first: tuple[None, ...] = (None,) if start == 0 else ()
    logprobs = first + (scores.logprobs if scores else ())
    if start < 0 or len(logprobs) != len(request.prompt_token_ids) - start:
        return (), (), ()
    if scores is None:
        return logprobs, (), ()
    return logprobs, top_pairs(scores), scores.id_logprobs


def top_pairs(scores: Scores) -> TopPairs:
    """Return the likeliest (id, logprob) of each position."""
    return tuple(
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(scores.top_ids, scores.top_logprobs, strict=True)
    )
