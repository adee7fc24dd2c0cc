"""Stop strings, matched over the bytes of generated tokens.

Owns the decision that a stop string has been generated. Must not know text: where
the text is cut is ``text.stream``'s business, which finds the same match with the
same function. Ids and lengths that end a generation are checked elsewhere.
"""

from collections.abc import Callable

from dovetail.text.stream import find_stop
from dovetail.wire.request import SamplingParams


class StopMatcher:
    """Watches one sequence for its stop strings. Used by the scheduler's thread.

    Keeps the last bytes only, one fewer than the longest stop string has.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop_strings: tuple[str, ...]) -> None:
        """Start before the first generated token.

        Args:
            token_bytes: the bytes a token contributes; must be the sequence's own
                view, in which special tokens are empty if it skips them
                (``Tokenizer.token_bytes`` with its ``skip_special_tokens``).
            stop_strings: validated stop strings, none of them empty.
        """
        self._token_bytes = token_bytes
        self._strings = stop_strings
        self._stops = tuple(stop.encode() for stop in stop_strings)
        self._tail_len = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""

    def push(self, token_id: int) -> str | None:
        """Take the next token and return the stop string completed inside it, or None.

        Of several it is the one whose last byte comes first, and of those that end
        together the longest: the choice depends on the bytes, not on token borders.
        """
        chunk = self._token_bytes(token_id)
        match = find_stop(self._tail, chunk, self._stops)
        data = self._tail + chunk
        self._tail = data[max(0, len(data) - self._tail_len) :]
        return None if match is None else self._strings[match.stop_index]


def stop_matcher(
    token_bytes: Callable[[int], bytes],
    special_ids: frozenset[int],
    sampling: SamplingParams,
) -> StopMatcher | None:
    """Return what watches a sequence for its stop strings, or None if it has none.

    Args:
        token_bytes: of every token, special or not.
        special_ids: those that say nothing in a request that skips them.
        sampling: the request's.
    """
    stops = sampling.stop_strings
    if not stops:
        return None
    hidden = special_ids if sampling.skip_special_tokens else frozenset[int]()
    return StopMatcher(lambda i: b"" if i in hidden else token_bytes(i), stops)
