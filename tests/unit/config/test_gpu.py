"""The GPU is taken if it runs the model; its pool is what weights and the largest step leave."""

import json
from pathlib import Path

import pytest

from dovetail.config.gpu import Gpu
from dovetail.config.pool import MemoryUse, PoolShape, pages_of_fraction
from dovetail.config.resolve import options_from, resolve, with_measured_pool
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError

H200 = Gpu(name="NVIDIA H200", memory_bytes=140 * 2**30)
GIB = 2**30
SHAPE = PoolShape(page_size=16, page_bytes=2**20, context_len=1600, max_running=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, head_dim=64)


def write_model(folder: Path, *, head_dim: int) -> Path:
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 100,
                "hidden_size": 64,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": head_dim,
                "max_position_embeddings": 1600,
            }
        )
    )
    return folder


def decide(folder: Path, gpu: Gpu | None = H200, **options: object) -> EngineConfig:
    return resolve(options_from({"model": str(folder), **options}), gpu)


def error_of(folder: Path, gpu: Gpu | None = H200, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        decide(folder, gpu, **options)
    return caught.value


# -- which device -----------------------------------------------------------------------------


def test_a_gpu_that_runs_the_model_is_taken(folder: Path) -> None:
    config = decide(folder)
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert config.reasons["device"] == "default: the NVIDIA H200"


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        (None, {}, "no NVIDIA GPU answers"),
        (
            Gpu(name="Old", memory_bytes=2**33, problem="it is old"),
            {},
            "not the Old, because it is old",
        ),
        (H200, {"page_size": 12}, "not the NVIDIA H200, because page_size is 12"),
        (H200, {"max_running": 5000}, "because max_running is 5000"),
        (H200, {"lanes": "threaded"}, "because lanes are CUDA streams"),
    ],
)
def test_else_the_host_is_and_the_reason_says_why(folder: Path, gpu, options, words) -> None:
    config = decide(folder, gpu, **options)
    assert (config.device, config.dtype, config.memory_fraction) == ("cpu", "float32", None)
    assert words in config.reasons["device"]


def test_a_model_that_its_kernels_cannot_run_stays_on_the_host(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=48)
    assert "heads of 48 dimensions" in decide(folder).reasons["device"]
    assert error_of(folder, device="cuda").field == "model"


def test_what_is_given_is_taken_or_refused(folder: Path) -> None:
    assert decide(folder, device="cpu").reasons["device"] == "given"
    assert decide(folder, None, device="cuda").device == "cuda"
    assert error_of(folder, device="cuda", page_size=12).field == "page_size"
    old = error_of(folder, Gpu(name="Old", memory_bytes=2**33, problem="it is old"), device="cuda")
    assert (old.field, old.message) == ("device", "cannot be the Old, because it is old")


# -- how much at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "vocab_size", "max_running", "chunk_size"),
    [
        (140, 151_936, 512, 8192),
        (80, 128_256, 512, 8192),
        (80, 262_144, 256, 8192),
        (24, 49_152, 384, 2048),
        (8, 151_936, 128, 2048),
        (8, 100, 512, 2048),
    ],
)
def test_how_much_runs_at_once_follows_from_the_gpu(
    folder: Path, gib: int, vocab_size: int, max_running: int, chunk_size: int
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocab_size}))
    config = decide(folder, Gpu(name="one", memory_bytes=gib * GIB))
    assert (config.max_running, config.chunk_size) == (max_running, chunk_size)
    assert config.max_step_tokens == max_running + chunk_size
    assert config.reasons["max_running"].startswith("default on a GPU")
    assert ("fewer" in config.reasons["max_running"]) == (max_running < 512)
    assert config.reasons["chunk_size"].startswith("default on a GPU")


def test_the_host_runs_less_at_once_and_who_is_given_numbers_keeps_them(folder: Path) -> None:
    config = decide(folder, None)
    assert (config.max_running, config.chunk_size) == (128, 512)
    assert config.reasons["max_running"] == config.reasons["chunk_size"] == "default on a CPU"
    config = decide(folder, max_running=3, chunk_size=5)
    assert (config.max_running, config.chunk_size) == (3, 5)
    assert config.reasons["max_running"] == config.reasons["chunk_size"] == "given"
    assert decide(folder, chunk_size=-1).chunk_size == 1600
    assert decide(folder, None, device="cuda").max_running == 512


# -- the pool ---------------------------------------------------------------------------------


def test_a_gpus_pool_is_sized_by_what_is_left_unless_its_size_is_given(folder: Path) -> None:
    config = decide(folder)
    assert config.memory_fraction == 0.9 and config.num_pages == 100  # one context, so far
    assert "decides when the engine starts" in config.reasons["num_pages"]
    assert decide(folder, memory_fraction=0.5).memory_fraction == 0.5
    for name, value in (("kv_memory", "64MiB"), ("num_pages", 200)):
        config = decide(folder, **{name: value})
        assert config.memory_fraction is None and config.num_pages >= 200
        assert config.reasons["memory_fraction"] == f"{name} given"


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        (H200, {"memory_fraction": 0.5, "kv_memory": "1GiB"}, "and kv_memory both say"),
        (H200, {"memory_fraction": 0.5, "num_pages": 200}, "and num_pages both say"),
        (H200, {"memory_fraction": 1.5}, "is 1.5; give a share"),
        (H200, {"memory_fraction": 0.0}, "is 0; give a share"),
        (H200, {"memory_fraction": 0.5, "device": "cpu"}, "runs on the CPU; give kv_memory"),
        (None, {"memory_fraction": 0.5}, "runs on the CPU; give kv_memory"),
    ],
)
def test_a_share_that_cannot_be_kept_is_refused_by_name(folder, gpu, options, words) -> None:
    error = error_of(folder, gpu, **options)
    assert error.field == "memory_fraction" and words in error.message


def test_the_pool_is_what_the_others_leave_of_the_share() -> None:
    use = MemoryUse(total=100 * GIB, weights=60 * GIB, step=5 * GIB, others=GIB)
    shape = PoolShape(page_size=16, page_bytes=2**20, context_len=1600, max_running=10**4)
    num_pages, reason = pages_of_fraction(shape, 0.9, use)
    assert num_pages == 24 * 1024 - 1  # a page for sink rows
    taken = use.weights + use.step + use.others + (num_pages + 1) * shape.page_bytes
    assert taken <= 0.9 * use.total
    for words in ("0.9 of 100.00 GiB", "60.00 GiB weights", "5.00 GiB for", "1.00 GiB CUDA"):
        assert words in reason


def test_no_more_pages_than_could_be_used() -> None:
    use = MemoryUse(total=100 * GIB, weights=GIB, step=GIB, others=GIB)
    num_pages, reason = pages_of_fraction(SHAPE, 0.9, use)
    assert num_pages == 800 and "would hold more" in reason


@pytest.mark.parametrize(("weights", "advice"), [(60, "at least 0.67, or lower"), (99, "; lower")])
def test_too_small_a_share_is_refused_with_the_numbers(weights: int, advice: str) -> None:
    use = MemoryUse(total=100 * GIB, weights=weights * GIB, step=6 * GIB, others=GIB // 2)
    with pytest.raises(ConfigError) as caught:
        pages_of_fraction(SHAPE, 0.6, use)
    error = caught.value
    assert error.field == "memory_fraction"
    for words in (f"{weights}.00 GiB weights", "context_len 1600 needs 0.10 GiB", advice):
        assert words in error.message
    if weights == 60:  # the advice holds
        assert pages_of_fraction(SHAPE, 0.67, use)[0] >= 100
        with pytest.raises(ConfigError):
            pages_of_fraction(SHAPE, 0.66, use)


def test_a_measured_pool_replaces_the_least_one(folder: Path) -> None:
    config = decide(folder, memory_fraction=0.5, max_running=128)
    use = MemoryUse(total=GIB, weights=2**20, step=2**20, others=2**20)
    sized = with_measured_pool(config, use)
    assert sized.num_pages == 128 * 100 and sized.reasons["num_pages"].startswith("max_running")
    assert sized.memory_fraction == 0.5 and config.num_pages == 100


def test_a_pool_larger_than_the_gpu_is_refused_with_the_numbers(folder: Path) -> None:
    small = Gpu(name="one", memory_bytes=2**20)
    told = str(error_of(folder, small, device="cuda", kv_memory="1GiB"))
    assert "kv_memory" in told and "bytes of KV, but one has 1048576; give at most" in told
    config = decide(folder, small, device="cpu", kv_memory="1GiB")  # it is in the host's memory
    assert config.num_pages > 0
