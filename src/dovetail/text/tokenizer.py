"""Text to token ids, and token ids to exact bytes, for one Hugging Face model folder.

Owns the id-to-bytes table, from which all generated text is made. Must not know
requests, sampling or streams.

Every token stands for fixed bytes, whatever its neighbours; text is those bytes
joined and decoded as UTF-8, invalid bytes becoming U+FFFD. For byte-level
tokenizers this is exactly what the ``tokenizers`` library decodes. For
SentencePiece-like ones it differs in two places, on purpose:

- the library drops a space at the very start of what it decodes; here it stays,
  because generated tokens continue a prompt and their space is real;
- the library turns a run of byte tokens that is not valid UTF-8 into one U+FFFD a
  byte, the valid characters in it too; here only the invalid bytes are replaced.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import tokenizers

from dovetail.errors import ConfigError, RequestError

DEFINITION_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"


class Tokenizer:
    """One model's tokenizer. Immutable, so any thread may use it.

    Attributes:
        vocab_size: one more than the largest id the tokenizer knows. A model's own
            (padded) vocabulary may be larger; the ids between have no text.
        longest_token: most bytes, so no fewer than most characters, that one token stands for.
        special_ids: ids that are left out of the text with ``skip_special_tokens``.
        special_tokens: the named special tokens, such as ``bos_token``, as strings.
        bos_token: begins a text, or None.
        eos_token: ends a text, or None.
        pad_token: fills up a batch, or None.
        eos_token_id: the id of ``eos_token``, or None. The model may have more
            end-of-sequence ids; its generation config knows them.
    """

    def __init__(self, definition: bytes, special_tokens: Mapping[str, str] | None = None) -> None:
        """Build the tokenizer and its table.

        Args:
            definition: the content of a ``tokenizer.json``.
            special_tokens: the named special tokens.

        Raises:
            ConfigError: the definition is broken or its decoder is not supported.
        """
        try:
            self._backend = tokenizers.Tokenizer.from_buffer(definition)
            decoder = msgspec.json.decode(definition, type=_Definition).decoder
        except Exception as error:  # the library documents no exception type
            raise ConfigError(
                DEFINITION_FILE, f"cannot be read ({error}); copy it again from the model's source"
            ) from None
        # A stored limit would cut prompts without a word; limits are the engine's to enforce.
        self._backend.no_truncation()
        self._backend.no_padding()

        self.special_ids = frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._bytes = _token_table(self._backend.get_vocab(), _byte_rule(decoder))
        self._visible_bytes = tuple(
            b"" if token_id in self.special_ids else token_bytes
            for token_id, token_bytes in enumerate(self._bytes)
        )
        self.vocab_size = len(self._bytes)
        self.longest_token = max(map(len, self._bytes), default=0)

        self.special_tokens = MappingProxyType(dict(special_tokens or {}))
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.pad_token = self.special_tokens.get("pad_token")
        self.eos_token_id = (
            None if self.eos_token is None else self._backend.token_to_id(self.eos_token)
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face model folder.

        Args:
            folder: holds ``tokenizer.json``; ``tokenizer_config.json`` and, for what
                that leaves open, ``special_tokens_map.json`` name the special tokens.

        Raises:
            ConfigError: a file is missing, broken or not supported; names the file.
        """
        folder = Path(folder)
        try:
            definition = (folder / DEFINITION_FILE).read_bytes()
        except OSError as error:
            raise ConfigError(
                DEFINITION_FILE,
                f"cannot be read in {folder} ({error.strerror}); save a fast tokenizer there with "
                "transformers' save_pretrained. For prompts of ids alone, "
                "Engine(folder, load_format='dummy') takes the embedded one, and "
                "refit(model.named_parameters()) brings the weights",
            ) from None
        named = read_json(folder / SPECIAL_TOKENS_FILE) | read_json(folder / CONFIG_FILE)
        return cls(definition, _special_tokens(named))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any valid Unicode text.
            add_special_tokens: add what the tokenizer adds to a plain prompt, such
                as BOS. Give False for text from a chat template, which has its own.

        Raises:
            RequestError: ``text`` is not a string or holds lone surrogates.
        """
        if not isinstance(text, str):
            raise RequestError("text", f"must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "text", f"is not valid Unicode: a lone surrogate at character {error.start}"
            ) from None
        # As a batch of one: for a single text the library keeps Python's lock, so that a long one
        # would stop all other threads.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes a token contributes to the text; ``b""`` for an unknown id.

        Args:
            token_id: a token id; it may lie outside the vocabulary.
            skip_special_tokens: let special tokens contribute nothing.
        """
        return self.joined_bytes((token_id,), skip_special_tokens=skip_special_tokens)

    def joined_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of tokens, one behind the other; see ``token_bytes``."""
        table = self._visible_bytes if skip_special_tokens else self._bytes
        size = self.vocab_size
        return b"".join([table[i] if 0 <= i < size else b"" for i in token_ids])

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, the same that a ``Detokenizer`` streams.

        Args:
            token_ids: token ids; unknown ones contribute nothing.
            skip_special_tokens: leave special tokens out.
        """
        data = self.joined_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; empty if there is no such file.

    Raises:
        ConfigError: the file is there but cannot be read as a JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            path.name, f"cannot be read ({error}); correct it or copy it again"
        ) from None


class _Definition(msgspec.Struct):
    """The one part of a ``tokenizer.json`` that the library does not tell us."""

    decoder: dict[str, Any] | None = None


def _special_tokens(named: Mapping[str, Any]) -> dict[str, str]:
    """Pick the named special tokens, given as strings or as ``{"content": ...}``."""
    picked: dict[str, str] = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            picked[name] = content
    return picked


def _token_table(vocab: Mapping[str, int], to_bytes: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """Return the bytes of every token, indexed by id."""
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    return tuple(table)


def _byte_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return how a token's string becomes bytes, from the decoder in ``tokenizer.json``.

    Added tokens follow the same rule, as they do in the library.
    """
    rewrites: list[tuple[str, str]] = []
    to_bytes: Callable[[str], bytes] = str.encode
    stage = "text"  # then "bytes", when the token has become bytes, then "fused"
    for step in _decoder_steps(decoder):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                stage == "text"
            ):
                rewrites.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)} if stage == "text":
                rewrites.append((mark, " "))
            case {"type": "ByteLevel"} if stage == "text":
                to_bytes, stage = _byte_level_rule(), "bytes"
            case {"type": "ByteFallback"} if stage == "text":
                to_bytes, stage = _byte_fallback, "bytes"
            case {"type": "Fuse"}:
                stage = "fused"
            case {"type": "Strip", "content": " ", "stop": 0} if stage == "fused":
                pass  # concerns the start of a whole text only: see the module's docstring
            case _:
                raise ConfigError(
                    DEFINITION_FILE,
                    f"decoder step {step} is not supported; use a byte-level or a "
                    "SentencePiece-like (Metaspace, ByteFallback) tokenizer",
                )
    if not rewrites:
        return to_bytes

    def rewrite_then_to_bytes(token: str) -> bytes:
        for old, new in rewrites:
            token = token.replace(old, new)
        return to_bytes(token)

    return rewrite_then_to_bytes


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ConfigError(
            DEFINITION_FILE, "has no decoder, so the text of a token is unknown; add one"
        )
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]


def _byte_level_rule() -> Callable[[str], bytes]:
    byte_of = byte_level_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # an added token in plain text, not in the alphabet
            return token.encode()

    return to_bytes


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary.

    Printable Latin-1 characters stand for their own code; the other bytes got the
    characters from U+0100 on, in order. Source: GPT-2's ``bytes_to_unicode``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _byte_fallback(token: str) -> bytes:
    """Return the byte that ``<0xAB>`` names, or the token's own UTF-8."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.encode()
