"""Tokenizers built on the spot: no test here reads a downloaded model."""

import functools
import json
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dovetail.text.tokenizer import Tokenizer

END = 256  # the id of "<|end|>", a special token, in every byte-level tokenizer below
FIRST_PIECE = 257


def byte_level_backend(pieces: Sequence[bytes] = ()) -> Backend:
    """Ids 0 to 255 are the bytes, 256 is special, the pieces follow."""
    character = bytes_to_unicode()
    vocab = {character[byte]: byte for byte in range(256)}
    vocab["<|end|>"] = END
    for offset, piece in enumerate(pieces):
        vocab["".join(character[byte] for byte in piece)] = FIRST_PIECE + offset
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., Tokenizer]:
    """Make a byte-level tokenizer with some multi-byte pieces (two bytes or more each)."""

    @functools.cache
    def build(pieces: tuple[bytes, ...], eos_token: str | None) -> Tokenizer:
        special_tokens = {} if eos_token is None else {"eos_token": eos_token}
        return Tokenizer(byte_level_backend(pieces).to_str().encode(), special_tokens)

    def make(pieces: Sequence[bytes] = (), eos_token: str | None = None) -> Tokenizer:
        return build(tuple(pieces), eos_token)

    return make


SENTENCEPIECE_WORDS = ["▁", "▁Hello", "▁world", "!", "a", "▁▁▁", "né", "日本"]


@pytest.fixture(scope="session")
def llama_definition() -> dict:
    """The ``tokenizer.json`` of a Llama-2-like tokenizer with byte fallback."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += SENTENCEPIECE_WORDS
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return json.loads(backend.to_str())
