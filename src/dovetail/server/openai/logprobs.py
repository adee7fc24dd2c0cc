"""Logprobs in OpenAI's two forms. What is no finite number is -9999.0: their types have no null.

Owns the forms and how a token is shown as text: its own bytes, with U+FFFD for what is no UTF-8.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.text.tokenizer import Tokenizer

LOWEST = -9999.0
Top = Sequence[Iterable[tuple[int, float]]]
"""For each position the likeliest (id, logprob); empty if not asked for."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float], top: Top
) -> dict[str, Any]:
    """Return the object of a chat's choice: an entry a token."""
    tops = top or [()] * len(token_ids)
    return {
        "content": [
            _entry(tokenizer, token_id, logprob)
            | {"top_logprobs": [_entry(tokenizer, *pair) for pair in row]}
            for token_id, logprob, row in zip(token_ids, logprobs, tops, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The columns of a completion's choice, in parts; offsets go on from part to part.

    Offsets count characters of the tokens' own texts, the prompt's among them with ``echo``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def part(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], top: Top
    ) -> dict[str, list[Any]]:
        """Return the columns of the next tokens; a logprob None stays null (position 0)."""
        columns: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        tops = top or [()] * len(token_ids)
        for token_id, logprob, row in zip(token_ids, logprobs, tops, strict=True):
            text = _text(self._tokenizer, token_id)
            best: dict[str, float] = {}
            for other_id, value in row:  # likeliest first: of equal texts the likeliest stays
                best.setdefault(_text(self._tokenizer, other_id), _number(value))
            if best and logprob is not None:
                best.setdefault(text, _number(logprob))
            columns["tokens"].append(text)
            columns["token_logprobs"].append(None if logprob is None else _number(logprob))
            columns["top_logprobs"].append(best if best else None)
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": _number(logprob),
        "bytes": list(data),
    }


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
