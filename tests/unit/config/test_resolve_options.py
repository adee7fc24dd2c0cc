"""What was typed becomes what is decided: every value has a reason, every mistake a name."""

import json
from pathlib import Path

import msgspec
import pytest

from dovetail.config.pool import kv_page_bytes, parse_bytes
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig, EngineOptions
from dovetail.errors import ConfigError

CONTEXT = 200
PAGE_BYTES = 16 * (
    2 * 3 * 2 * 8 * 4 + 4
)  # 16 tokens: K and V, 3 layers, 2 heads of 8 floats; an id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 100,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": CONTEXT,
            }
        )
    )
    return tmp_path


def decide(folder: Path, **options: object) -> EngineConfig:
    return resolve(options_from({"model": str(folder), **options}))


def error_of(folder: Path, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        decide(folder, **options)
    return caught.value


# -- decisions ------------------------------------------------------------------------------


def test_every_field_has_a_reason(folder):
    config = decide(folder)
    assert set(config.reasons) == set(EngineConfig.__struct_fields__) - {"model", "reasons"}
    assert all(config.reasons.values())


def test_defaults(folder):
    config = decide(folder)
    assert (config.dtype, config.depth, config.context_len) == ("float32", 1, CONTEXT)
    assert (config.page_size, config.chunk_size, config.max_running) == (16, 512, 128)
    assert config.max_step_tokens == 512 + 128
    assert (config.max_queued, config.max_open) == (4096, 4096 + 128)
    assert config.num_threads == 1
    assert config.model_folder == str(folder.resolve())
    assert config.max_pages_per_sequence == 13
    # 512 MiB would hold more than can be used.
    assert config.num_pages == 128 * 13
    assert "kv_memory would hold more" in config.reasons["num_pages"]


def test_what_is_given_is_taken_and_says_so(folder):
    given = {
        "depth": 0,
        "page_size": 4,
        "num_pages": 77,
        "context_len": 50,
        "max_running": 3,
        "max_queued": 0,
        "chunk_size": 9,
        "dtype": "bfloat16",
        "num_threads": 2,
        "prefix_cache": False,
        "lanes": "threaded",
    }
    config = decide(folder, **given)
    for name, value in given.items():
        assert getattr(config, name) == value
        assert config.reasons[name] == "given"


def test_no_chunk_limit_is_a_whole_context(folder):
    config = decide(folder, chunk_size=-1)
    assert config.chunk_size == CONTEXT
    assert "-1" in config.reasons["chunk_size"]


def test_the_largest_chunk_is_legal(folder):
    assert decide(folder, chunk_size=1_048_576).chunk_size == 1_048_576


def test_kv_memory_counts_what_a_page_takes(folder):
    model = decide(folder).model
    assert kv_page_bytes(model, dtype="float32", page_size=16) == PAGE_BYTES
    assert kv_page_bytes(model, dtype="bfloat16", page_size=16) == (PAGE_BYTES - 64) // 2 + 64
    config = decide(folder, kv_memory=PAGE_BYTES * 20 + 5)
    assert config.num_pages == 20
    assert config.reasons["num_pages"] == (
        f"kv_memory {PAGE_BYTES * 20 + 5} at {PAGE_BYTES} bytes a page"
    )


def test_num_pages_wins_over_kv_memory(folder):
    assert decide(folder, num_pages=40, kv_memory="1B").num_pages == 40


# -- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"depth": -1}, "depth", "is -1; the legal range is 0 to 8"),
        ({"depth": 9}, "depth", "is 9; the legal range is 0 to 8"),
        ({"page_size": 0}, "page_size", "is 0; the legal range is 1 to 1024"),
        ({"page_size": 2048}, "page_size", "is 2048"),
        ({"num_pages": 0}, "num_pages", "is 0"),
        ({"max_running": 0}, "max_running", "is 0"),
        ({"max_queued": -1}, "max_queued", "is -1"),
        ({"num_threads": 0}, "num_threads", "is 0"),
        ({"context_len": 1}, "context_len", "is 1; the legal range is 2 to"),
        ({"chunk_size": 0}, "chunk_size", "is 0; give at least 1, or -1"),
        ({"chunk_size": -2}, "chunk_size", "is -2"),
        ({"chunk_size": 1_048_577}, "chunk_size", "is 1048577; give at most 1048576"),
        ({"chunk_size": 10**12}, "chunk_size", "is 1000000000000"),
        ({"context_len": 201}, "context_len", "is 201, but the model was made for 200"),
        ({"num_pages": 12}, "num_pages", "12 pages of 16 tokens"),
        ({"num_pages": 12}, "num_pages", f"context_len 200 needs 13 pages ({13 * PAGE_BYTES} b"),
        ({"kv_memory": PAGE_BYTES * 13 - 1}, "kv_memory", "gives 12 pages"),
        ({"num_pages": 2 * 10**9}, "num_pages", "bytes of KV, but this machine has"),
        ({"num_pages": 199, "page_size": 1}, "num_pages", "needs 200 pages"),
        ({"kv_memory": "1KB"}, "kv_memory", "gives 0 pages"),
        ({"kv_memory": "lots"}, "kv_memory", "'lots' is not a size"),
        ({"kv_memory": 0}, "kv_memory", "0 is no memory at all"),
        ({"kv_memory": -5}, "kv_memory", "-5 is not a size"),
    ],
)
def test_a_wrong_option_is_named_with_its_numbers(folder, options, field, words):
    error = error_of(folder, **options)
    assert error.field == field
    assert words in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depht": 1}, "depht: is no engine option; the options are capture, chunk_size"),
        ({"depth": "1"}, "depth: expected `int | null`"),
        ({"depth": 1.0}, "depth: expected `int | null`"),
        ({"page_size": None}, "page_size: expected `int`"),
        ({"dtype": "float16"}, "dtype: is 'float16'; legal are auto, float32, bfloat16"),
        ({"device": "tpu"}, "device: is 'tpu'; legal are auto, cpu, cuda"),
        ({"lanes": "many"}, "lanes: is 'many'; legal are inline, threaded"),
        ({"policy": "fair"}, "policy: is 'fair'; legal are fcfs, priority, longest-prefix"),
        ({"kv_memory": 0.5}, "kv_memory: expected `int | str | null`"),
        ({"prefix_cache": 1}, "prefix_cache: expected `bool`"),
        ({"capture": [1]}, "capture[0]: expected `str`"),
        ({"dtype": 32}, "dtype: expected `str`, got `int`; legal are auto, float32, bfloat16"),
    ],
)
def test_a_wrong_type_or_name_is_named(folder, options, words):
    assert words in str(error_of(folder, **options))


def test_an_empty_model_name_is_not_the_embedded_model(tmp_path, monkeypatch):
    """As an unset shell variable would give."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(EngineOptions(model=""))


def test_a_pool_of_exactly_one_context_is_enough(folder):
    assert decide(folder, num_pages=13).num_pages == 13
    assert decide(folder, num_pages=CONTEXT, page_size=1).num_pages == CONTEXT


# -- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1048576, 1 << 20),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5KiB", 1536),
        (" 3 kB ".replace("k", "K"), 3000),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(value, expected):
    assert parse_bytes("kv_memory", value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "MiB", "1.MiB", "-1", "1e9", "5mib", "5 MiB/s", "nan", "inf", "0", "0.1B", "9" * 400],
)
def test_what_is_no_size(value):
    with pytest.raises(ConfigError) as caught:
        parse_bytes("kv_memory", value)
    assert caught.value.field == "kv_memory"


def test_options_are_frozen(folder):
    with pytest.raises(AttributeError):
        decide(folder).depth = 5
    assert msgspec.structs.replace(decide(folder), depth=5).depth == 5
