"""Whole replies of a call of ``/generate``, however it came.

Owns what a call means for its replies; ``core.reply`` has their shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.core.generation import Generation
from dovetail.core.reply import TextOf, generate_reply
from dovetail.core.routes import Columns, Placement, RoutesAsked
from dovetail.server.native_body import Call
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import Request

Place = Callable[[Columns], Placement]


class ReplyMaker:
    """Knows what the replies of one call hold.

    Args:
        call: what was asked.
        tokenizer: of the model.
        num_layers: of the model, dense ones included.
        place: where columns of our own form go; None leaves them in the replies.
    """

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, num_layers: int, place: Place | None = None
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self.routes = _routes_asked(call, num_layers, place)

    @property
    def text_of(self) -> TextOf | None:
        """Makes the text of a token beside its logprob, if the call asks for it."""
        if not self._call.return_text_in_logprobs:
            return None
        tokenizer = self._tokenizer
        return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)

    def whole(self, index: int, request: Request, generation: Generation) -> dict[str, Any]:
        """Return the reply of one generation of the call's item ``index``."""
        reply = generate_reply(
            generation,
            label=request.label or "",
            logprobs=self._call.items[index].logprobs,
            text_of=self.text_of,
            routes=self.routes,
        )
        return self.completed(reply, request)

    def completed(self, reply: dict[str, Any], request: Request) -> dict[str, Any]:
        """Add what the call asks for beside the generation itself."""
        if self._call.return_prompt_token_ids:
            reply["prompt_token_ids"] = request.prompt_token_ids
        return reply


def _routes_asked(call: Call, num_layers: int, place: Place | None) -> RoutesAsked | None:
    if not call.capture.columns:
        return None
    return RoutesAsked(
        sglang=call.return_routed_experts,
        own=call.wants_columns,
        num_layers=num_layers,
        start_len=call.capture.start_len,
        place=place,
    )


def reply_size(answers: Sequence[Sequence[Generation]]) -> int:
    """Return about how many bytes the replies of these generations take."""
    generations = [generation for some in answers for generation in some]
    num_numbers = sum(len(g.token_ids) + len(g.prompt_logprobs) for g in generations)
    return num_numbers * _BYTES_PER_TOKEN + sum(g.captured_bytes for g in generations)


_BYTES_PER_TOKEN = 40
