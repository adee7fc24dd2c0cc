"""Token ids to text, piece by piece, with stop strings held back and cut.

Owns when text is certain and where it ends. Must not know how events reach a
client, nor decide when a generation stops: ``sched.stop`` does, and the stop
string is found here by the same function (``find_stop``).

Work is done on bytes. A stream's bytes are those of its tokens, one after another;
special tokens have none if ``skip_special_tokens``, on both sides. Bytes that a
finish could still take away are held; released bytes go through one incremental
UTF-8 decoder, which holds an unfinished character itself. Nothing is looked at
twice, so a stream costs time linear in its length and memory linear in its longest
stop string.
"""

import codecs
from bisect import bisect_left
from collections.abc import Collection, Iterable
from typing import NamedTuple

from dovetail.errors import InvariantError
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import SamplingParams
from dovetail.wire.result import FinishReason


class StopMatch(NamedTuple):
    """Where a stop string was found.

    Attributes:
        stop_index: which of the stop strings.
        start: offset of its first byte in ``tail + chunk``.
        end: offset just behind its last byte.
    """

    stop_index: int
    start: int
    end: int


def find_stop(tail: bytes, chunk: bytes, stops: tuple[bytes, ...]) -> StopMatch | None:
    """Return the first stop string that ends inside ``chunk``, or None.

    First is the one completed first if the bytes arrived one at a time, so it does
    not depend on where tokens begin: the earliest end, and of two that end together
    the earlier start (the longer one).

    Args:
        tail: the bytes before ``chunk``, at least as far back as any stop string
            that ends inside ``chunk`` can begin.
        chunk: the bytes of the newest token.
        stops: the stop strings as UTF-8, none of them empty.
    """
    if not stops:
        return None
    data = tail + chunk
    matches = [
        StopMatch(index, start, start + len(stop))
        for index, stop in enumerate(stops)
        if (start := data.find(stop, max(0, len(tail) - len(stop) + 1))) >= 0
    ]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


class Detokenizer:
    """The text of one running generation. Used by one thread at a time.

    What ``push`` and ``finish`` return, joined, is ``generation_text`` of the same
    tokens, however they were split.

    Invariant: ``_held`` is the shortest end of the bytes that covers every stop
    string begun or just completed and a last token that may be cut off whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: the model's tokenizer.
            sampling: validated parameters.
            eos_token_ids: the ids that the scheduler takes as end of sequence.
                ``stop_token_ids``, the special ids and the tokenizer's own EOS are
                known; a model whose EOS is none of these must give it.
        """
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stops = tuple(stop.encode() for stop in sampling.stop_strings)
        self._sorted_stops = sorted(self._stops)
        self._ending_ids = tokenizer.special_ids.union(
            eos_token_ids, sampling.stop_token_ids or (), (tokenizer.eos_token_id,)
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self._match: StopMatch | None = None  # ends in the last token; offsets into _held
        self._last_id: int | None = None
        self._last_len = 0  # bytes of the last token

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now.

        Args:
            token_ids: ids in the order they were committed; may be empty.
        """
        ids = tuple(token_ids)
        if not self._stops and len(ids) > 1:
            # With another token behind it, none of these can be cut off.
            self._held += self._tokenizer.joined_bytes(
                ids[:-1], skip_special_tokens=self._sampling.skip_special_tokens
            )
            ids = ids[-1:]
        return "".join([self._push_token(token_id) for token_id in ids])

    def finish(self, reason: FinishReason) -> str:
        """Return the rest of the text, cut as ``reason`` says. Call it once, last.

        A matched stop string ends the text before its first byte, a matched id
        before its token; with ``no_stop_trim`` the text ends behind the stop string,
        or behind the token. Nothing is cut for the other reasons.

        Raises:
            InvariantError: ``reason`` names a stop that the last token did not bring.
        """
        certain = self._held[: self._end_of_text(reason)]
        self._held = b""
        return self._decoder.decode(certain, final=True)

    def _push_token(self, token_id: int) -> str:
        chunk = self._tokenizer.token_bytes(
            token_id, skip_special_tokens=self._sampling.skip_special_tokens
        )
        match = find_stop(self._held, chunk, self._stops)
        data = self._held + chunk
        release = len(data) - len(chunk) if token_id in self._ending_ids else len(data)
        if match is not None:
            release = min(release, match.start)
        release = self._first_begun_stop(data, release)

        self._held = data[release:]
        if match is not None:
            match = StopMatch(match.stop_index, match.start - release, match.end - release)
        self._match = match
        self._last_id, self._last_len = token_id, len(chunk)
        return self._decoder.decode(data[:release])

    def _first_begun_stop(self, data: bytes, limit: int) -> int:
        """Return the first offset below ``limit`` where a stop string may have begun, or ``limit``.

        It has if the rest of ``data`` is the beginning of one. What is skipped is
        released for good, so the loop runs once a byte over a whole stream.
        """
        if self._sorted_stops:
            for start in range(limit):
                begun = data[start:]
                # Sorted, the strings with a common beginning follow right behind it.
                place = bisect_left(self._sorted_stops, begun)
                if place < len(self._stops) and self._sorted_stops[place].startswith(begun):
                    return start
        return limit

    def _end_of_text(self, reason: FinishReason) -> int:
        """Return the offset in ``_held`` where the text ends."""
        if reason.matched is None:
            return len(self._held)
        keep_stop = self._sampling.no_stop_trim
        if isinstance(reason.matched, str):
            match = self._match
            if match is None or self._sampling.stop_strings[match.stop_index] != reason.matched:
                raise InvariantError(f"the last token does not end stop string {reason.matched!r}")
            return match.end if keep_stop else match.start
        if reason.matched != self._last_id:
            raise InvariantError(f"the last token is {self._last_id}, not {reason.matched}")
        if keep_stop:
            return len(self._held)
        if self._last_len > len(self._held):
            raise InvariantError(
                f"the text of token {self._last_id} is out; name it in eos_token_ids"
            )
        return len(self._held) - self._last_len


def generation_text(
    tokenizer: Tokenizer,
    token_ids: Iterable[int],
    sampling: SamplingParams,
    finish: FinishReason,
) -> str:
    """Return the whole text of a finished generation: a pure function of its record.

    Args:
        tokenizer: the model's tokenizer.
        token_ids: all generated ids, a matched stop id included.
        sampling: validated parameters.
        finish: why the generation ended.

    Raises:
        InvariantError: ``finish`` names a stop that the last token did not bring.
    """
    eos_token_ids = (finish.matched,) if isinstance(finish.matched, int) else ()
    detokenizer = Detokenizer(tokenizer, sampling, eos_token_ids=eos_token_ids)
    return detokenizer.push(token_ids) + detokenizer.finish(finish)
