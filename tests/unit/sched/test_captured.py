"""The captured rows of a sequence: appended once, never rewritten, and honest about their past."""

from itertools import pairwise

import numpy as np
import pytest

from dovetail.config.capture import ColumnSpec
from dovetail.errors import InvariantError
from dovetail.sched import captured
from dovetail.sched.captured import CapturedColumns
from dovetail.wire.capture import CapturedRows, CaptureSpan

SPECS = {
    "experts": ColumnSpec(np.dtype(np.uint8), (2, 1), 255),
    "expert_weights": ColumnSpec(np.dtype(np.float32), (2, 1), np.nan),
}


def rows(start: int, end: int, *, salt: int = 0) -> dict[str, np.ndarray]:
    """Rows that tell their position; another salt is another forward."""
    positions = np.arange(start, end)
    values = np.stack([positions + salt, positions], axis=1)[..., None]
    return {name: values.astype(spec.dtype) for name, spec in SPECS.items()}


def spans_of(columns: CapturedColumns, name: str = "experts") -> tuple[CaptureSpan, ...]:
    return columns.news(is_last=True)[name].spans


def span(start: int, end: int, epoch: int = 0, again: int = 0, differing: int = 0) -> CaptureSpan:
    return CaptureSpan(
        start=start, end=end, epoch=epoch, num_recomputed=again, num_differing=differing
    )


def positions_of(part: CapturedRows) -> list[int]:
    return part.rows.unpack()[:, 1, 0].astype(int).tolist()


def rows_of(part: CapturedRows) -> list:
    return part.rows.unpack().tolist()


def rows_of_range(name: str, start: int, end: int) -> list:
    return rows(start, end)[name].tolist()


def test_rows_leave_once_and_in_order():
    columns = CapturedColumns(SPECS, start=3, max_rows=64)
    columns.begin(0, 0)
    seen: list[int] = []
    for start, end in ((3, 5), (5, 6), (6, 11)):
        columns.forwarded(end, 0)
        columns.append(start, rows(start, end), end=end)
        if end != 6:
            part = columns.news(is_last=False)["experts"]
            assert part.start == 3 + len(seen) and not part.spans
            seen += positions_of(part)
            assert not columns.has_news
    last = columns.news(is_last=True)["experts"]
    assert seen == list(range(3, 11)) and last.rows.shape == (0, 2, 1)
    assert last.spans == (span(3, 11),)


def test_each_row_has_the_epoch_of_its_forward():
    """A prefix hit, a chunk and decode steps, with an update of the weights in between."""
    columns = CapturedColumns(SPECS, start=2, max_rows=64)
    columns.begin(4, 7)
    for end, epoch in ((6, 7), (7, 8), (8, 8), (9, 9)):
        columns.forwarded(end, epoch)
    columns.append(2, rows(2, 9), end=9)
    assert spans_of(columns) == (span(2, 6, 7), span(6, 8, 8), span(8, 9, 9))


def test_what_is_computed_again_is_compared_and_not_taken():
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    columns.begin(0, 0)
    columns.forwarded(6, 0)
    columns.append(0, rows(0, 6), end=6)
    columns.forget_memory()
    assert columns.planned == 0 and columns.recorded == 6
    columns.begin(2, 1)  # two come from the cache, under new weights
    columns.forwarded(8, 1)
    again = {name: values.copy() for name, values in rows(0, 8).items()}
    for row in (1, 3, 4):
        again["experts"][row, 0] += 100
    again["expert_weights"][5, 0] += 1e-3
    columns.append(0, {name: values[:5] for name, values in again.items()}, end=8)
    columns.append(5, {name: values[5:] for name, values in again.items()}, end=8)
    news = columns.news(is_last=True)
    assert positions_of(news["experts"]) == list(range(8))
    np.testing.assert_array_equal(news["experts"].rows.unpack()[:6], rows(0, 6)["experts"])
    assert news["experts"].spans == (
        span(0, 2, 0, again=0, differing=1),
        span(2, 6, 0, again=1, differing=2),
        span(6, 8, 1),
    )
    assert [s.num_differing for s in news["expert_weights"].spans] == [0, 1, 0]


def test_rows_that_are_read_in_pieces_leave_as_they_lie():
    """To join them at the end would take the loop's thread from everybody else's next token."""
    columns = CapturedColumns(SPECS, start=0, max_rows=9)
    columns.begin(0, 0)
    columns.forwarded(9, 0)
    for start, end in ((0, 2), (2, 7), (5, 9)):
        columns.append(start, rows(start, end), end=9)
    held = dict(columns._rows)
    for name, part in columns.news(is_last=True).items():
        [piece] = part.rows.pieces
        assert np.shares_memory(np.frombuffer(piece, dtype=np.uint8), held[name])
        assert positions_of(part) == list(range(9))


def test_what_has_left_stays_as_it_was_when_more_comes(monkeypatch):
    monkeypatch.setattr(captured, "ROOM_BYTES", 8)  # so that memory has to grow
    columns = CapturedColumns(SPECS, start=3, max_rows=1000)
    columns.begin(0, 0)
    columns.forwarded(250, 0)
    parts, cuts = [], (3, 4, 9, 10, 40, 41, 100, 250)
    for start, end in pairwise(cuts):
        columns.append(start, rows(start, end), end=250)
        parts.append(columns.news(is_last=False))
    for name in SPECS:
        assert [p for part in parts for p in rows_of(part[name])] == rows_of_range(name, 3, 250)


def test_a_few_rows_do_not_hold_memory_for_many():
    columns = CapturedColumns(SPECS, start=0, max_rows=500)
    columns.begin(0, 0)
    columns.forwarded(7, 0)
    columns.append(0, rows(0, 7), end=7)
    for name, part in columns.news(is_last=True).items():
        [piece] = part.rows.pieces
        assert len(columns._rows[name]) == 500
        assert not np.shares_memory(np.frombuffer(piece, dtype=np.uint8), columns._rows[name])


def test_rows_behind_the_end_are_dropped():
    """Read ahead of the commit that told of the end."""
    columns = CapturedColumns(SPECS, start=2, max_rows=64)
    columns.begin(0, 0)
    columns.forwarded(6, 0)
    spoilt = rows(2, 9)
    spoilt["experts"][5] = 255  # of a token that is none
    columns.append(2, spoilt, end=6)
    columns.append(9, rows(9, 11), end=6)
    assert columns.recorded == 6
    assert positions_of(columns.news(is_last=True)["experts"]) == [2, 3, 4, 5]


@pytest.mark.parametrize("borders", [(0, 9), (0, 3, 9), (0, 1, 4, 8, 9)])
@pytest.mark.parametrize("again_borders", [(0, 9), (0, 4, 9), (0, 2, 3, 9)])
def test_the_second_reading_may_come_in_other_pieces(borders, again_borders):
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    for salted, cuts in (((), borders), ((0, 3, 7, 8), again_borders)):
        columns.begin(0, 0)
        columns.forwarded(9, 0)
        whole = rows(0, 9)
        whole["experts"][list(salted), 0] += 100
        for start, end in pairwise(cuts):
            columns.append(
                start, {name: values[start:end] for name, values in whole.items()}, end=9
            )
        columns.forget_memory()
    news = columns.news(is_last=True)
    assert news["experts"].spans == (span(0, 9, again=1, differing=4),)
    assert news["expert_weights"].spans == (span(0, 9, again=1),)
    np.testing.assert_array_equal(news["experts"].rows.unpack(), rows(0, 9)["experts"])


def test_every_further_life_counts():
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    for life, end in enumerate((4, 6, 9)):
        columns.begin(0, 0)
        columns.forwarded(end, 0)
        columns.append(0, rows(0, end, salt=life), end=end)
        if end != 9:
            columns.forget_memory()
    assert spans_of(columns) == (
        span(0, 4, again=2, differing=4),
        span(4, 6, again=1, differing=2),
        span(6, 9),
    )


def test_memory_that_was_lost_before_it_was_read_changes_nothing():
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    columns.begin(0, 0)
    columns.forwarded(4, 0)
    columns.append(0, rows(0, 4), end=4)
    columns.forget_memory()
    columns.begin(0, 0)
    columns.forwarded(3, 0)
    columns.forget_memory()
    assert spans_of(columns) == (span(0, 3, again=1), span(3, 4))


@pytest.mark.parametrize("name", SPECS)
def test_a_row_that_nobody_wrote_is_no_row(name):
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    columns.begin(0, 0)
    columns.forwarded(4, 0)
    spoilt = rows(0, 4)
    spoilt[name][2, 1] = SPECS[name].poison
    with pytest.raises(InvariantError, match=f"column {name} has no row for position 2"):
        columns.append(0, spoilt, end=4)


def test_a_gap_is_an_error():
    columns = CapturedColumns(SPECS, start=0, max_rows=64)
    columns.begin(0, 0)
    with pytest.raises(InvariantError, match="rows from position 2, but 0 are recorded"):
        columns.append(2, rows(2, 3), end=4)
