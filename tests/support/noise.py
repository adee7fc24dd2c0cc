"""The documented noise of the sampler, written from its definition in plain numpy.

Owns Philox4x32-10 and the Gumbel noise made of it. Must not know models or the package under test.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

import numpy as np

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return the four random words of each counter.

    Args:
        counter: uint32 ``[..., 4]``.
        key: two 32-bit words, low word first.

    Returns:
        uint32 ``[..., 4]``.
    """
    # Words are kept in uint64, so that a product of two of them does not overflow.
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = key
    low, shift = np.uint64(LOW), np.uint64(32)
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def random_words(seed: int, position: int, sample_index: int, vocab_size: int) -> np.ndarray:
    """Return the random word of each token id, uint32 ``[vocab_size]``.

    Token ``t`` takes word ``t % 4`` of counter ``(t // 4, position, sample_index, 0)``; the
    key is the 64-bit seed.
    """
    num_blocks = -(-vocab_size // 4)
    counter = np.zeros((num_blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(num_blocks)
    counter[:, 1] = position
    counter[:, 2] = sample_index
    return philox4x32(counter, (seed & LOW, seed >> 32)).reshape(-1)[:vocab_size]


def gumbel(words: np.ndarray) -> np.ndarray:
    """Turn random words into standard Gumbel noise, float32 of the same shape.

    ``u = (x + 0.5) * 2^-32`` and ``g = -log(-log1p(-u))``, all in float32. ``u`` rounds to 1 for
    the largest words, which gives ``-inf``: such a token is not drawn.
    """
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        return -np.log(-np.log1p(-u))
