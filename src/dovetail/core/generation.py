"""What users of the in-process engine get: stream events and generations.

Owns how token events become text. A ``Generation`` is the sum of its stream events,
so the streamed and the whole answer cannot differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.text.stream import Detokenizer
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, TokenEvent, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """News of one generation.

    Attributes:
        request_id: the engine's id; ``Engine.abort`` takes it.
        text: text that has become certain; it may lag behind ``token_ids`` while a
            character or a possible stop string is incomplete.
        token_ids, logprobs, weight_versions: one entry per new token.
        finish_reason: set in the last event only.
        usage: set in the last event only.
        captured: set in the last event only; see ``Generation``.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    captured: dict[str, NDArray[np.generic]] = field(default_factory=dict[str, NDArray[np.generic]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished generation.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated ids; a matched stop id is the last one.
        text: of ``token_ids``, cut before a matched stop.
        finish_reason: why it ended; ``type`` is stop, length, abort or error.
        logprobs: natural log of each token's probability at the request's
            temperature (1 for greedy), before truncation.
        weight_versions: weights version of the forward that sampled each token.
        seed: the seed that was used; give it back to draw the same tokens again.
        usage: token counts.
        captured: column name -> array over the forwarded positions, first axis
            ``prompt + output - 1``.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    seed: int
    usage: Usage
    captured: dict[str, NDArray[np.generic]]


class StreamDecoder:
    """Turns one request's token events into stream events."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.sampling, eos_token_ids=eos_token_ids)

    def decode(self, event: TokenEvent) -> StreamEvent:
        """Return the event with the text that it makes certain."""
        text = self._detokenizer.push(event.token_ids)
        if event.finish is not None:
            text += self._detokenizer.finish(event.finish)
        captured = event.captured or {}
        return StreamEvent(
            request_id=event.request_id,
            text=text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            weight_versions=event.epochs,
            finish_reason=event.finish,
            usage=event.usage,
            captured={name: envelope.unpack() for name, envelope in captured.items()},
        )


def collect(request: Request, events: Iterable[StreamEvent]) -> Generation:
    """Return the generation that a request's stream events add up to."""
    parts = list(events)
    last = parts[-1]
    assert last.finish_reason is not None and last.usage is not None
    return Generation(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        finish_reason=last.finish_reason,
        logprobs=tuple(value for part in parts for value in part.logprobs),
        weight_versions=tuple(value for part in parts for value in part.weight_versions),
        seed=request.seed,
        usage=last.usage,
        captured=last.captured,
    )
