"""A row is forwarded only if the device was told a page for its last token."""

import numpy as np
import pytest

from dovetail.exec.batch import has_pages

TABLE = np.array([[7, 3, -1], [5, -1, -1], [2, 4, 6]])
"""Pages of three slots, of 4 tokens each."""
SLOTS = np.array([1, 0, 2])


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ((4, 8, 12), True),
        ((1, 1, 1), True),
        ((4, 9, 12), False),
        ((5, 8, 12), False),
        ((4, 8, 13), False),
        ((4, 8, 1000), False),
    ],
)
def test_a_row_has_a_page_for_its_last_token(ends, wanted):
    assert has_pages(TABLE, SLOTS, np.array(ends), page_size=4) == wanted


def test_no_rows_lack_nothing():
    none = np.zeros(0, dtype=np.int64)
    assert has_pages(TABLE, none, none, page_size=4)
