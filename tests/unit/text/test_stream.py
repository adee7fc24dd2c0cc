"""Streams against a brute-force reference: whole bytes, matched one byte at a time."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.errors import InvariantError
from dovetail.sched.stop import StopMatcher
from dovetail.text.stream import Detokenizer, generation_text
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import SamplingParams
from dovetail.wire.result import FinishReason

END = 256
LENGTH = FinishReason(type="length")

# --- the reference -------------------------------------------------------------------------


def first_stop(data: bytes, stops: Iterable[str]) -> tuple[str, int] | None:
    """The first stop completed as bytes arrive one by one, the longest of several; its end."""
    for end in range(1, len(data) + 1):
        hits = [stop for stop in stops if data[:end].endswith(stop.encode())]
        if hits:
            return max(hits, key=lambda stop: len(stop.encode())), end
    return None


def token_bytes(tokenizer: Tokenizer, ids: Iterable[int], sampling: SamplingParams) -> list[bytes]:
    return [
        b"" if sampling.skip_special_tokens and token_id == END else tokenizer.token_bytes(token_id)
        for token_id in ids
    ]


def reference(
    tokenizer: Tokenizer, ids: Sequence[int], sampling: SamplingParams
) -> tuple[list[int], FinishReason, str]:
    """The ids up to the stop, why it ended, and the text."""
    pieces = token_bytes(tokenizer, ids, sampling)
    data = b"".join(pieces)
    found = first_stop(data, sampling.stop_strings)
    if found is None:
        return list(ids), LENGTH, data.decode(errors="replace")
    stop, end = found
    ends = list(itertools.accumulate(map(len, pieces)))
    num_tokens = next(index for index, reached in enumerate(ends) if reached >= end) + 1
    cut = end if sampling.no_stop_trim else end - len(stop.encode())
    reason = FinishReason(type="stop", matched=stop)
    return list(ids[:num_tokens]), reason, data[:cut].decode(errors="replace")


# --- what is tested ------------------------------------------------------------------------


def streamed(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sampling: SamplingParams,
    finish: FinishReason,
    chunk: int = 1,
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, sampling)
    deltas = [detokenizer.push(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    return [*deltas, detokenizer.finish(finish)]


def matcher(tokenizer: Tokenizer, sampling: SamplingParams) -> StopMatcher:
    def visible(token_id: int) -> bytes:
        return tokenizer.token_bytes(token_id, skip_special_tokens=sampling.skip_special_tokens)

    return StopMatcher(visible, sampling.stop_strings)


def check(
    tokenizer: Tokenizer, all_ids: Sequence[int], sampling: SamplingParams, chunk: int = 1
) -> None:
    """Scheduler, stream and pure function agree with the reference."""
    ids, finish, text = reference(tokenizer, all_ids, sampling)
    watch = matcher(tokenizer, sampling)
    assert [watch.push(token_id) for token_id in ids] == [None] * (len(ids) - 1) + (
        [finish.matched] if ids else []
    )
    assert "".join(streamed(tokenizer, ids, sampling, finish, chunk)) == text
    assert generation_text(tokenizer, ids, sampling, finish) == text


def substrings(data: bytes) -> list[bytes]:
    starts = range(len(data))
    cuts = {data[i:j] for i in starts for j in range(i + 2, len(data) + 1)}
    return sorted(cuts)


def splits(data: bytes) -> Iterable[list[bytes]]:
    """All ways to cut the data into pieces."""
    for borders in itertools.product([False, True], repeat=len(data) - 1):
        cuts = [0, *(i for i, cut in enumerate(borders, 1) if cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(cuts)]


def piece_ids(pieces: Sequence[bytes]) -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)} | {
        piece: 257 + offset for offset, piece in enumerate(pieces)
    }


# --- stop strings --------------------------------------------------------------------------


STOPS = [  # of 2 to 12 bytes
    *("\n#", "日", "aaab", "é日", "</end>", "\n<a>\n<b"),
    *("日本\n\n", "ababababc", "STOP 👍!", "### Human:\n", "<|im_start|>"),
]


def test_the_stops_have_the_sizes() -> None:
    assert [len(stop.encode()) for stop in STOPS] == list(range(2, 13))


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_at_every_alignment_to_token_borders(byte_level, stop: str) -> None:
    """B101: cut into tokens in every possible way."""
    data = b"a" + stop.encode() + b"z"
    pieces = substrings(data)
    ids_of = piece_ids(pieces)
    tokenizer = byte_level(pieces)
    for split in splits(data):
        check(tokenizer, [ids_of[piece] for piece in split], SamplingParams(stop=(stop,)))


@pytest.mark.parametrize(
    "stops",
    [
        ("ab", "abc", "abcd"),
        ("abcd", "bc"),
        ("bcd", "abcd", "cd"),
        ("aab", "ab", "b"),
        ("abx", "aby", "bcdz"),
        ("xabcd", "abcde", "d"),
        ("ab", "ab"),
    ],
)
def test_stops_that_share_beginnings_and_ends(byte_level, stops: tuple[str, ...]) -> None:
    data = b"xaabcde"
    pieces = substrings(data)
    ids_of = piece_ids(pieces)
    tokenizer = byte_level(pieces)
    for order in itertools.permutations(stops):
        for split in splits(data):
            check(tokenizer, [ids_of[piece] for piece in split], SamplingParams(stop=order))


@pytest.mark.parametrize("chunk", range(1, 8))
def test_near_misses_are_released_whole(byte_level, chunk: int) -> None:
    """B103: newlines must not vanish because a stop begins with one."""
    tokenizer = byte_level([b"\n<", b"x>", b"\n\n"])
    sampling = SamplingParams(stop=("\n<x>", "\n\n\n#", "日本"))
    text = "a\nb\n\nc\n<y>\n<x\n\n<x\n\n\n<日月日".encode()
    check(tokenizer, [*text, 257, 10, 259, 259, 257, *b"x"], sampling, chunk)
    check(tokenizer, [*text, 257, 257, 258, *b"tail"], sampling, chunk)


@settings(deadline=None, max_examples=600)
@given(
    ids=st.lists(st.sampled_from([97, 98, 10, 0xC3, 0xA9, END, 257, 258, 259, 260]), max_size=40),
    stops=st.lists(st.text("ab\né", min_size=1, max_size=5), max_size=4),
    skip=st.booleans(),
    keep=st.booleans(),
    chunk=st.integers(1, 7),
)
@example(ids=[97, END, 98], stops=["ab"], skip=True, keep=False, chunk=1)
@example(ids=[0xC3, 97, 98], stops=["a"], skip=True, keep=False, chunk=1)
def test_any_stream_is_its_reference(
    byte_level, ids: list[int], stops: list[str], skip: bool, keep: bool, chunk: int
) -> None:
    tokenizer = byte_level([b"ab", b"b\na", b"a\xc3", b"\xa9\n\nab"])
    sampling = SamplingParams(stop=tuple(stops), skip_special_tokens=skip, no_stop_trim=keep)
    check(tokenizer, ids, sampling, chunk)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.sampled_from([97, 98, 10, 257, 258]), max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_all_certain_text_flows(byte_level, ids: list[int], stops: list[str]) -> None:
    """Held back is the longest end that is the beginning of a stop, not a byte more."""
    tokenizer = byte_level([b"ab", b"b\na"])
    sampling = SamplingParams(stop=tuple(stops))
    ids, finish, _ = reference(tokenizer, ids, sampling)
    running = ids[:-1] if finish.type == "stop" else ids
    detokenizer = Detokenizer(tokenizer, sampling)
    out = ""
    for count, token_id in enumerate(running, 1):
        out += detokenizer.push([token_id])
        whole = b"".join(token_bytes(tokenizer, running[:count], sampling)).decode()
        ends = (len(whole) - n for n in range(len(whole) + 1))
        held = max(len(whole) - at for at in ends if any(s.startswith(whole[at:]) for s in stops))
        assert out == whole[: len(whole) - held]


def test_a_match_that_ended_nothing_stays_in_the_text(byte_level) -> None:
    """Length and abort cut nothing; nor does a stop that the scheduler let pass."""
    tokenizer = byte_level([b"xSTOPy"])
    sampling = SamplingParams(stop="STOP")
    for finish in (LENGTH, FinishReason(type="abort"), FinishReason(type="error")):
        for ids in ([97, 257], [257, 97], [257, 83, 84], [257, 257]):
            text = tokenizer.decode(ids)
            assert "".join(streamed(tokenizer, ids, sampling, finish)) == text
    later = [257, 97, *b"STOP"]
    stop = FinishReason(type="stop", matched="STOP")
    assert "".join(streamed(tokenizer, later, sampling, stop)) == "xSTOPya"
    assert generation_text(tokenizer, later, sampling, stop) == "xSTOPya"


# --- stop ids and special tokens -----------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "keep", "text"),
    [
        (True, False, "hi"),
        (True, True, "hi"),
        (False, False, "hi"),
        (False, True, "hi<|end|>"),
    ],
)
def test_a_special_token_that_ends_the_text(byte_level, skip: bool, keep: bool, text: str) -> None:
    """B109."""
    sampling = SamplingParams(skip_special_tokens=skip, no_stop_trim=keep, stop=("<|e|", "ii"))
    finish = FinishReason(type="stop", matched=END)
    ids = [*b"hi", END]
    tokenizer = byte_level()
    for chunk in range(1, 4):
        assert "".join(streamed(tokenizer, ids, sampling, finish, chunk)) == text
    assert generation_text(tokenizer, ids, sampling, finish) == text


@pytest.mark.parametrize(("keep", "text"), [(False, "hi"), (True, "hi<>")])
@pytest.mark.parametrize("stop", [None, "<>x", "i<y"])
def test_an_ordinary_token_that_ends_the_text(
    byte_level, keep: bool, text: str, stop: str | None
) -> None:
    sampling = SamplingParams(stop_token_ids=(257,), no_stop_trim=keep, stop=stop)
    finish = FinishReason(type="stop", matched=257)
    tokenizer = byte_level([b"<>"])
    assert "".join(streamed(tokenizer, [*b"hi", 257], sampling, finish)) == text
    assert generation_text(tokenizer, [*b"hi", 257], sampling, finish) == text


def test_a_stop_id_in_the_middle_is_released(byte_level) -> None:
    """With ``ignore_eos`` an ending id may be followed by more."""
    tokenizer = byte_level()
    sampling = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    detokenizer = Detokenizer(tokenizer, sampling)
    assert detokenizer.push([97, END]) == "a"
    assert detokenizer.push([98]) == "<|end|>b"
    assert detokenizer.push([END]) == ""
    assert detokenizer.finish(LENGTH) == "<|end|>"


def test_an_eos_that_only_the_model_knows(byte_level) -> None:
    tokenizer = byte_level([b"EOS"])
    finish = FinishReason(type="stop", matched=257)
    told = Detokenizer(tokenizer, SamplingParams(), eos_token_ids=(257,))
    assert told.push([97, 257]) + told.finish(finish) == "a"
    assert generation_text(tokenizer, [97, 257], SamplingParams(), finish) == "a"
    untold = Detokenizer(tokenizer, SamplingParams())
    untold.push([97, 257])
    with pytest.raises(InvariantError, match="eos_token_ids"):
        untold.finish(finish)


def test_the_tokenizers_own_eos_is_known(byte_level) -> None:
    tokenizer = byte_level([b"EOS"], eos_token="EOS")
    finish = FinishReason(type="stop", matched=257)
    assert "".join(streamed(tokenizer, [97, 257], SamplingParams(), finish)) == "a"


@pytest.mark.parametrize("matched", ["zz", "yy", 5])
def test_a_stop_that_did_not_happen_is_a_bug(byte_level, matched: int | str) -> None:
    sampling = SamplingParams(stop=("yy", "bc"), stop_token_ids=(5, 99))
    with pytest.raises(InvariantError, match="the last token"):
        generation_text(
            byte_level(), list(b"abc"), sampling, FinishReason(type="stop", matched=matched)
        )


def test_skipped_special_tokens_do_not_separate_a_stop(byte_level) -> None:
    tokenizer = byte_level()
    ids = [*b"xST", END, *b"OP"]
    check(tokenizer, ids, SamplingParams(stop="STOP"))
    assert matcher(tokenizer, SamplingParams(stop="<|end|>")).push(END) is None
    visible = SamplingParams(stop="|end", skip_special_tokens=False)
    assert matcher(tokenizer, visible).push(END) == "|end"
    check(tokenizer, ids, visible)


# --- characters ----------------------------------------------------------------------------

SCRIPTS = {
    "emoji with joiners": "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽",
    "CJK": "日本語の文章と漢字𠮷",
    "Thai": "ภาษาไทยที่มีสระ",
    "combining marks": "e\u0301a\u0308\u0323 ğ Z͑ͫ̓ͪ",
    "Devanagari": "क्षत्रिय",
}


@pytest.mark.parametrize("chunk", range(1, 8))
@pytest.mark.parametrize("name", SCRIPTS)
def test_characters_are_never_split(byte_level, name: str, chunk: int) -> None:
    """B123: one byte a token; no replacement character unless the ids end inside one."""
    text = SCRIPTS[name]
    tokenizer, sampling = byte_level(), SamplingParams(stop=("日x", "\u0301!"))
    data = text.encode()
    for size in range(len(data) + 1):
        deltas = streamed(tokenizer, list(data[:size]), sampling, LENGTH, chunk)
        assert "".join(deltas) == data[:size].decode(errors="replace")
        assert not any("\ufffd" in delta for delta in deltas[:-1])


def test_a_character_flows_with_its_last_byte(byte_level) -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams())
    assert [detokenizer.push([byte]) for byte in "é日👍".encode()] == [
        *("", "é"),
        *("", "", "日"),
        *("", "", "", "👍"),
    ]


def test_a_broken_character_is_replaced_when_it_is_known_to_be_broken(byte_level) -> None:
    detokenizer = Detokenizer(byte_level(), SamplingParams())
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push([97]) == "\ufffda"
    assert detokenizer.push([0xE0, 0x80]) == "\ufffd\ufffd"
    assert detokenizer.push([0xE6, 0x97]) == ""
    assert detokenizer.finish(LENGTH) == "\ufffd"


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=40), chunk=st.integers(1, 7))
def test_any_bytes_stream_as_they_decode(byte_level, data: bytes, chunk: int) -> None:
    deltas = streamed(byte_level(), list(data), SamplingParams(), LENGTH, chunk)
    assert "".join(deltas) == data.decode(errors="replace")


# --- cost ----------------------------------------------------------------------------------


class CountingTokenizer:
    """Passes calls on and counts them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner = tokenizer
        self.num_looked_up = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        self.num_looked_up += 1
        return self.inner.token_bytes(token_id, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("replacement", [b"\xff", "\ufffd".encode(), b"\x80\x80"])
def test_thousands_of_replacement_characters_cost_the_same_each(
    byte_level, replacement: bytes
) -> None:
    """B121, B125: text flows, each token is looked at once, and nothing piles up."""
    tokenizer = CountingTokenizer(byte_level([b"\x80\x80", "\ufffd".encode()]))
    token_id = {b"\xff": 0xFF, b"\x80\x80": 257}.get(replacement, 258)
    expected = replacement.decode(errors="replace")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="never\ufffd"))  # type: ignore[arg-type]
    for _ in range(2000):
        assert detokenizer.push([token_id]) == expected
        assert detokenizer._held == b""
    assert detokenizer.finish(LENGTH) == ""
    assert tokenizer.num_looked_up == 2000


def test_state_is_as_long_as_the_longest_stop(byte_level) -> None:
    stop = "a" * 50 + "b"
    sampling = SamplingParams(stop=(stop, "aab"))
    detokenizer = Detokenizer(byte_level(), sampling)
    watch = matcher(byte_level(), sampling)
    out = ""
    for _ in range(1000):
        out += detokenizer.push([97])
        assert watch.push(97) is None
        assert len(detokenizer._held) <= 50
        assert len(watch._tail) <= 50
    assert out + detokenizer.finish(LENGTH) == "a" * 1000


def test_no_stops_keep_no_tail(byte_level) -> None:
    watch = matcher(byte_level([b"abc"]), SamplingParams())
    assert [watch.push(257) for _ in range(3)] == [None] * 3
    assert watch._tail == b""
    single = matcher(byte_level([b"abc"]), SamplingParams(stop="z"))
    assert (single.push(257), single._tail) == (None, b"")
