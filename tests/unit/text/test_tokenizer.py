"""The id-to-bytes table against the ``tokenizers`` library and transformers."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

import dovetail
from dovetail.errors import ConfigError, RequestError
from dovetail.text.tokenizer import Tokenizer, byte_level_alphabet

TINY_MOE = Path(dovetail.__file__).parent / "assets" / "tiny-moe"
TEXTS = [
    "Hello, world!\n\tif x == 1:\r\n",
    "日本語 ภาษาไทย é e\u0301 👩‍👩‍👧‍👦 🇩🇪 \u200d\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(TINY_MOE)


@pytest.fixture(scope="module")
def tiny_backend() -> Backend:
    return Backend.from_file(str(TINY_MOE / "tokenizer.json"))


def write_folder(folder: Path, definition: object, **files: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_byte_level_alphabet_is_gpt2s() -> None:
    assert byte_level_alphabet() == {c: b for b, c in bytes_to_unicode().items()}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_tiny_moe_round_trip(tiny: Tokenizer, tiny_backend: Backend, text: str, skip: bool) -> None:
    ids = tiny.encode(text)
    assert ids == tiny_backend.encode(text).ids
    assert tiny.decode(ids, skip_special_tokens=skip) == tiny_backend.decode(ids, skip)
    assert tiny.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 2100), max_size=30), skip=st.booleans())
def test_decode_of_any_ids_is_the_librarys(
    tiny: Tokenizer, tiny_backend: Backend, ids: list[int], skip: bool
) -> None:
    assert tiny.decode(ids, skip_special_tokens=skip) == tiny_backend.decode(ids, skip)


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=30))
def test_decode_of_any_bytes_is_the_librarys(byte_level, data: bytes) -> None:
    tokenizer = byte_level()
    expected = tokenizer._backend.decode(list(data))
    assert tokenizer.decode(data) == expected


def test_every_token_of_tiny_moe_has_its_bytes(tiny: Tokenizer, tiny_backend: Backend) -> None:
    assert tiny.vocab_size == tiny_backend.get_vocab_size()
    assert tiny.special_ids == {0, 1, 2}
    byte_of = {c: b for b, c in bytes_to_unicode().items()}
    for token_id in range(3, tiny.vocab_size):
        token = tiny_backend.id_to_token(token_id) or ""
        assert tiny.token_bytes(token_id) == bytes(byte_of[c] for c in token)
    assert tiny.token_bytes(2) == b"<|im_end|>"
    assert tiny.token_bytes(2, skip_special_tokens=True) == b""


def test_unknown_ids_have_no_bytes(tiny: Tokenizer) -> None:
    for token_id in (-1, -tiny.vocab_size, tiny.vocab_size, 2**40):
        assert tiny.token_bytes(token_id) == b""
    hello = tiny.encode("hello")
    assert tiny.decode([*hello, 10**6, -1, *hello]) == "hellohello"


def test_named_special_tokens(tiny: Tokenizer, tmp_path: Path) -> None:
    assert (tiny.bos_token, tiny.eos_token, tiny.pad_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tiny.eos_token_id == 2

    definition = json.loads((TINY_MOE / "tokenizer.json").read_text())
    folder = write_folder(
        tmp_path,
        definition,
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "pad_token": None,
            "add_bos_token": True,
            "tokenizer_class": "AnyFast",
        },
        special_tokens_map={"bos_token": {"content": "<|im_start|>"}, "eos_token": "wrong"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.eos_token_id, tokenizer.pad_token) == (2, None)


def test_no_names_at_all(tmp_path: Path) -> None:
    definition = json.loads((TINY_MOE / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, definition))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.special_ids == {0, 1, 2}


def test_added_tokens_decode_as_in_the_library(byte_level) -> None:
    backend = Backend.from_str(byte_level()._backend.to_str())
    contents = ["a b", "<\uff5cUser\uff5c>", "<tool>", "Ġx", "日本", "\n\n"]
    backend.add_tokens([AddedToken(content, normalized=False) for content in contents])
    tokenizer = Tokenizer(backend.to_str().encode())
    ids = {content: tokenizer.encode(content)[0] for content in contents}
    for token_id in ids.values():
        assert token_id > 256
        assert tokenizer.decode([65, token_id, 66]) == backend.decode([65, token_id, 66])
    assert tokenizer.token_bytes(ids["<\uff5cUser\uff5c>"]) == "<\uff5cUser\uff5c>".encode()
    assert tokenizer.special_ids == {256}


def test_stored_truncation_and_padding_are_switched_off(byte_level) -> None:
    backend = Backend.from_str(byte_level()._backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    assert Tokenizer(backend.to_str().encode()).encode("abcdefgh") == list(b"abcdefgh")


def test_add_special_tokens(byte_level) -> None:
    backend = Backend.from_str(byte_level()._backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    tokenizer = Tokenizer(backend.to_str().encode())
    assert tokenizer.encode("a") == [256, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_a_long_text_does_not_stop_other_threads(tiny: Tokenizer) -> None:
    """It takes hundreds of milliseconds; a thread that waits a millisecond at a time goes on."""
    num_turns, is_done = 0, threading.Event()

    def turn() -> None:
        nonlocal num_turns
        while not is_done.wait(0.001):
            num_turns += 1

    thread = threading.Thread(target=turn)
    thread.start()
    before = num_turns
    tiny.encode("word " * 200_000)
    after = num_turns
    is_done.set()
    thread.join()
    assert after - before > 10


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", None, 5, ["a", "b"], b"a"])
def test_text_that_is_no_text(tiny: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError) as caught:
        tiny.encode(text)  # type: ignore[arg-type]
    assert caught.value.field == "text"


class TestSentencePiece:
    def test_words_and_byte_tokens(self, llama_definition: dict) -> None:
        tokenizer = Tokenizer(json.dumps(llama_definition).encode())
        backend = Backend.from_str(json.dumps(llama_definition))
        to_id = backend.get_vocab().__getitem__
        assert tokenizer.token_bytes(to_id("<0xE2>")) == b"\xe2"
        assert tokenizer.token_bytes(to_id("▁▁▁")) == b"   "
        ids = [to_id("a"), to_id("▁Hello"), *(3 + byte for byte in "👍ß".encode()), to_id("né")]
        assert tokenizer.decode(ids) == backend.decode(ids) == "a Hello👍ßné"
        assert tokenizer.decode([1, *ids, 2], skip_special_tokens=False) == "<s>a Hello👍ßné</s>"

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.sampled_from(["a", "▁", "▁Hello", "▁▁▁", "!", "né", "ß", "👍"])))
    def test_valid_text_is_the_librarys_but_for_the_first_space(
        self, llama_definition: dict, pieces: list[str]
    ) -> None:
        tokenizer = Tokenizer(json.dumps(llama_definition).encode())
        backend = Backend.from_str(json.dumps(llama_definition))
        ids: list[int] = []
        for piece in pieces:
            known = backend.token_to_id(piece)
            ids += [known] if known is not None else [3 + byte for byte in piece.encode()]
        ours, theirs = tokenizer.decode(ids), backend.decode(ids)
        assert ours == "".join(pieces).replace("▁", " ")
        assert ours.removeprefix(" ") == theirs

    def test_invalid_byte_tokens_are_replaced_one_by_one(self, llama_definition: dict) -> None:
        tokenizer = Tokenizer(json.dumps(llama_definition).encode())
        assert tokenizer.decode([3 + 0xFF, 3 + 0xC3, 3 + 0x9F]) == "\ufffdß"

    def test_metaspace_decoder(self) -> None:
        backend = Backend(models.Unigram([("▁Hello", -1.0), ("▁", -2.0), ("<0xZZ>", -3.0)], 0))
        backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
        tokenizer = Tokenizer(backend.to_str().encode())
        assert tokenizer.decode([0, 0, 1, 2]) == " Hello Hello <0xZZ>"


class TestRefusals:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"tokenizer\.json.*save a fast tokenizer there .*load_format='dummy'"
        ):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["", "{}", "[1]", "{not json", '{"decoder": 5}'])
    def test_broken_file(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json.*copy it again") as caught:
            Tokenizer.from_folder(tmp_path)
        assert caught.value.field == "tokenizer.json"

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
    @pytest.mark.parametrize("content", ["", "[]", "{"])
    def test_broken_names(self, tmp_path: Path, name: str, content: str) -> None:
        write_folder(tmp_path, json.loads((TINY_MOE / "tokenizer.json").read_text()))
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError) as caught:
            Tokenizer.from_folder(tmp_path)
        assert caught.value.field == name

    @pytest.mark.parametrize(
        "decoder",
        [
            None,
            decoders.WordPiece(),
            decoders.BPEDecoder(),
            decoders.CTC(),
            decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
            decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
            decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        ],
    )
    def test_unsupported_decoder(self, byte_level, decoder: object) -> None:
        backend = Backend.from_str(byte_level()._backend.to_str())
        backend.decoder = decoder  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=r"decoder"):
            Tokenizer(backend.to_str().encode())

    def test_nested_sequence_is_supported(self, byte_level) -> None:
        backend = Backend.from_str(byte_level()._backend.to_str())
        backend.decoder = decoders.Sequence(
            [decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()]
        )
        assert Tokenizer(backend.to_str().encode()).decode("é\x00".encode()) == "é\x00"
