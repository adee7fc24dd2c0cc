"""The noise is the published generator, turned into Gumbel variables as documented."""

import numpy as np
import pytest

from tests.support.noise import gumbel, philox4x32, random_words

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(np.array(counter, dtype=np.uint32), key)
    assert tuple(words.tolist()) == expected


def test_words_are_laid_out_as_documented():
    seed = 0xA4093822 | 0x299F31D0 << 32
    words = random_words(seed, position=9, sample_index=2, vocab_size=10)
    assert words.shape == (10,)
    for token_id in range(10):
        counter = np.array((token_id // 4, 9, 2, 0), dtype=np.uint32)
        block = philox4x32(counter, (0xA4093822, 0x299F31D0))
        assert words[token_id] == block[token_id % 4]


def test_every_part_of_the_key_matters():
    words = [
        random_words(*key, vocab_size=8).tobytes()
        for key in [(0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (2**64 - 1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert len(set(words)) == len(words)


def test_gumbel_is_float32_and_its_ends_are_harmless():
    noise = gumbel(np.array([0, 1 << 31, ONES], dtype=np.uint32))
    assert noise.dtype == np.float32
    assert noise[0] == pytest.approx(-33 * np.log(0.5), rel=1e-6)  # the largest there is
    assert noise[1] == pytest.approx(-np.log(np.log(2)), rel=1e-6)
    assert noise[2] == -np.inf


def test_gumbel_has_the_right_mean_and_variance():
    noise = gumbel(random_words(5, 0, 0, vocab_size=400_000)).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
