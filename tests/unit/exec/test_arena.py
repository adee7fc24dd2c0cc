"""A step has one segment to itself, and what it takes beyond that is given back behind it."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from dovetail.exec.cuda.arena import StepArena


class BestFit:
    """Segments as PyTorch's allocator cuts them: the least piece that does, else a new segment."""

    def __init__(self) -> None:
        self.segments: list[int] = []
        self._pieces: list[tuple[int, int, int]] = []  # free ones: bytes, segment, offset
        self.is_in_use = False

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        assert not self.is_in_use
        self.is_in_use = True
        yield
        self.is_in_use = False

    def num_bytes(self) -> int:
        return sum(self.segments)

    def renew(self, num_bytes: int) -> None:
        self.segments = [num_bytes]

    def play(self, sizes: Sequence[int]) -> None:
        """Allocate all of it and let it go."""
        assert self.is_in_use
        self._pieces = [(n, i, 0) for i, n in enumerate(self.segments)]
        for size in sizes:
            fitting = [piece for piece in self._pieces if piece[0] >= size]
            if not fitting:
                self.segments.append(size)
                continue
            found = num_bytes, segment, offset = min(fitting)
            self._pieces.remove(found)
            self._pieces.append((num_bytes - size, segment, offset + size))


STEPS = [[9, 5, 5], [7, 6, 6], [8, 4, 4, 3], [5, 7, 7], [6, 6, 5, 2], [10, 9]]
"""What steps allocate. None takes more than 19 in all."""


def play(arena: StepArena, segments: BestFit, steps: Sequence[Sequence[int]]) -> list[int]:
    """Return what is taken of the device behind each step."""
    taken = []
    for sizes in steps:
        arena.run(segments.play, sizes)
        arena.settle()
        taken.append(segments.num_bytes())
    return taken


def test_sizes_that_differ_take_no_more_than_the_largest() -> None:
    segments = BestFit()
    arena = StepArena(segments)
    arena.fit(lambda: segments.play([9, 5, 5]))
    assert play(arena, segments, STEPS * 3) == [19] * 18
    assert (arena.num_bytes, arena.num_overflows) == (19, 0)


def test_without_a_reserve_they_do() -> None:
    segments = BestFit()
    assert max(play(StepArena(segments), segments, STEPS)) > 19


def test_what_is_tried_out_decides_how_much_is_reserved() -> None:
    segments = BestFit()
    arena = StepArena(segments)
    for sizes in ([4], [4, 4], [3], [2, 9], [8]):
        arena.fit(lambda sizes=sizes: segments.play(sizes))
    assert segments.segments == [arena.num_bytes] == [17]  # 4 + 4, and 9 did not fit beside 2


def test_what_a_step_takes_beyond_that_is_given_back_behind_it() -> None:
    segments = BestFit()
    arena = StepArena(segments)
    arena.fit(lambda: segments.play([6, 6]))
    arena.run(segments.play, [6, 7])
    assert segments.num_bytes() == 19
    arena.settle()
    assert segments.segments == [12] and arena.num_overflows == 1
    segments.segments.append(100)  # nobody looks while nothing was run
    arena.settle()
    assert arena.num_overflows == 1


def test_it_returns_what_the_work_returns() -> None:
    segments = BestFit()
    arena = StepArena(segments)
    assert arena.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        arena.run(divmod, 7, 0)
