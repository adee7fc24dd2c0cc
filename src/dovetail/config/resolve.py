"""From what was typed to what is decided. The only maker of ``EngineConfig``.

Must not touch a device: facts about one are passed in.
"""

import os

import msgspec

from dovetail.config.capture import ColumnSpec, checked_capture, column_specs
from dovetail.config.gpu import (
    Gpu,
    check_gpu_limits,
    default_chunk_size,
    default_max_running,
)
from dovetail.config.hub import locate_model
from dovetail.config.model import ModelConfig
from dovetail.config.moe_backend import decide_moe_backend
from dovetail.config.payload import readout_bytes, sample_score_bytes
from dovetail.config.pool import (
    DEFAULT_KV_MEMORY,
    DEFAULT_MEMORY_FRACTION,
    MemoryUse,
    PoolShape,
    check_pool,
    kv_page_bytes,
    pages_of_fraction,
    pages_of_size,
)
from dovetail.config.schema import DeviceName, DTypeName, EngineConfig, EngineOptions
from dovetail.errors import ConfigError
from dovetail.wire.typed import field_and_message

MAX_CHUNK_SIZE = 2**20
"""Buffers hold a whole chunk, whether or not one ever comes."""

DEFAULT_MAX_RUNNING_ON_CPU = 128
DEFAULT_CHUNK_SIZE_ON_CPU = 512

MAX_READOUT_BYTES = 2**22
"""Kept free for read-outs: what a step copies for one request, the others wait for."""


def resolve(options: EngineOptions, gpu: Gpu | None = None) -> EngineConfig:
    """Decide every value that the user left open, and check the whole.

    Args:
        options: what the user wants.
        gpu: the GPU of this machine; None if there is none.

    Raises:
        ConfigError: the model cannot be found, an option is out of range, or the options
            contradict each other or the model; names the option and the numbers.
    """
    _check_ranges(options)
    reasons: dict[str, str] = {}
    folder, reasons["model_folder"] = locate_model(options.model)
    model = ModelConfig.from_folder(folder)
    device = _decide_device(options, model, gpu, reasons)
    dtype = _decide_dtype(options, device, reasons)
    moe_backend, reasons["moe_backend"] = decide_moe_backend(
        options, device=device, dtype=dtype, model=model, gpu=gpu
    )
    context_len = _decide_context_len(options, model, reasons)
    capture = checked_capture(options.capture, model)
    memory_fraction = _decide_memory_fraction(options, device, reasons)
    max_running = _decide_max_running(options, device, gpu, model, reasons)
    pool = PoolShape(
        page_size=options.page_size,
        page_bytes=kv_page_bytes(model, dtype=dtype, page_size=options.page_size, capture=capture),
        context_len=context_len,
        max_running=max_running,
    )
    num_pages = _decide_num_pages(
        options, gpu if device == "cuda" else None, memory_fraction, pool, reasons
    )
    depth = 1 if options.depth is None else options.depth
    reasons["depth"] = "default: overlap" if options.depth is None else "given"
    chunk_size = _decide_chunk_size(options, device, gpu, context_len, reasons)
    reasons["max_step_tokens"] = "chunk_size + max_running: a chunk beside a full decode batch"
    for name in (
        "page_size", "max_queued", "policy", "prefix_cache", "capture",
        "lanes", "load_format", "graphs",
    ):  # fmt: skip
        reasons[name] = _given(options, name)
    return EngineConfig(
        model_folder=str(folder.resolve()),
        model=model,
        dtype=dtype,
        device=device,
        depth=depth,
        page_size=options.page_size,
        memory_fraction=memory_fraction,
        num_pages=num_pages,
        context_len=context_len,
        max_running=max_running,
        max_queued=options.max_queued,
        chunk_size=chunk_size,
        max_step_tokens=chunk_size + max_running,
        max_payload_bytes=_decide_payload_bytes(
            max_running, context_len, column_specs(model, capture), reasons
        ),
        policy=options.policy,
        prefix_cache=options.prefix_cache,
        capture=capture,
        num_threads=_decide_num_threads(options, model, reasons),
        lanes=options.lanes,
        load_format=options.load_format,
        graphs=options.graphs,
        moe_backend=moe_backend,
        reasons=reasons,
    )


def options_from(values: dict[str, object]) -> EngineOptions:
    """Return typed options from keyword arguments or parsed flags.

    Raises:
        ConfigError: an unknown option or a value of the wrong type; names it.
    """
    known = set(EngineOptions.__struct_fields__)
    for name in values:
        if name not in known:
            raise ConfigError(
                name, f"is no engine option; the options are {', '.join(sorted(known))}"
            )
    if isinstance(values.get("capture"), str):  # the one column that most want
        values = {**values, "capture": (values["capture"],)}
    try:
        return msgspec.convert(values, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(*field_and_message(error, EngineOptions)) from None


def _given(options: EngineOptions, name: str) -> str:
    default = getattr(EngineOptions(), name)
    return "default" if getattr(options, name) == default else "given"


def _check_ranges(options: EngineOptions) -> None:
    for name, low, high in (
        ("depth", 0, 8),
        ("page_size", 1, 1024),
        ("num_pages", 1, 2**31 - 1),
        ("context_len", 2, 2**31 - 1),
        ("max_running", 1, 65536),
        ("max_queued", 0, 2**31 - 1),
        ("num_threads", 1, 1024),
    ):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(name, f"is {value}; the legal range is {low} to {high}")
    chunk_size = 1 if options.chunk_size is None else options.chunk_size
    if chunk_size != -1 and chunk_size < 1:
        raise ConfigError("chunk_size", f"is {chunk_size}; give at least 1, or -1 for no limit")
    if chunk_size > MAX_CHUNK_SIZE:
        raise ConfigError("chunk_size", f"is {chunk_size}; give at most {MAX_CHUNK_SIZE}, or -1")


def _decide_device(
    options: EngineOptions, model: ModelConfig, gpu: Gpu | None, reasons: dict[str, str]
) -> DeviceName:
    def check() -> None:
        check_gpu_limits(
            max_running=options.max_running,
            page_size=options.page_size,
            lanes=options.lanes,
            model=model,
        )

    if options.device != "auto":
        reasons["device"] = "given"
        if options.device == "cuda":
            if gpu is not None and gpu.problem is not None:
                raise ConfigError("device", f"cannot be the {gpu.name}, because {gpu.problem}")
            check()
        return options.device
    if gpu is None:
        reasons["device"] = "default: no NVIDIA GPU answers"
        return "cpu"
    if gpu.problem is not None:
        reasons["device"] = f"default: not the {gpu.name}, because {gpu.problem}"
        return "cpu"
    try:
        check()
    except ConfigError as error:
        reasons["device"] = f"default: not the {gpu.name}, because {error.field} {error.message}"
        return "cpu"
    reasons["device"] = f"default: the {gpu.name}"
    return "cuda"


def _decide_dtype(options: EngineOptions, device: DeviceName, reasons: dict[str, str]) -> DTypeName:
    if options.dtype != "auto":
        reasons["dtype"] = "given"
        return options.dtype
    if device == "cuda":
        reasons["dtype"] = "default on a GPU: what its matrix units are made for"
        return "bfloat16"
    reasons["dtype"] = "default on a CPU: float32 is exact and, on most CPUs, faster than bfloat16"
    return "float32"


def _decide_context_len(options: EngineOptions, model: ModelConfig, reasons: dict[str, str]) -> int:
    longest, window = model.max_position_embeddings, model.sliding_window
    if window is not None and window < longest:
        return _decide_windowed_context_len(options, window, reasons)
    if options.context_len is None:
        reasons["context_len"] = "the model's max_position_embeddings"
        return longest
    if options.context_len > longest:
        raise ConfigError(
            "context_len",
            f"is {options.context_len}, but the model was made for {longest} positions; "
            f"give at most {longest}",
        )
    reasons["context_len"] = "given"
    return options.context_len


def _decide_windowed_context_len(
    options: EngineOptions, window: int, reasons: dict[str, str]
) -> int:
    """Within the window, full attention computes what windowed attention does."""
    if options.context_len is None:
        reasons["context_len"] = (
            "the model's sliding_window: attention past the window is not there yet, and within "
            "it full attention computes the same"
        )
        return window
    if options.context_len > window:
        raise ConfigError(
            "context_len",
            f"is {options.context_len}, but this model attends within a sliding window of {window} "
            f"tokens, and window attention is not there yet; give at most {window}, within which "
            "full attention computes the same",
        )
    reasons["context_len"] = "given; within the model's sliding_window"
    return options.context_len


def _decide_max_running(
    options: EngineOptions,
    device: DeviceName,
    gpu: Gpu | None,
    model: ModelConfig,
    reasons: dict[str, str],
) -> int:
    if options.max_running is not None:
        reasons["max_running"] = "given"
        return options.max_running
    if device == "cuda":
        max_running, reasons["max_running"] = default_max_running(gpu, model.vocab_size)
        return max_running
    reasons["max_running"] = "default on a CPU"
    return DEFAULT_MAX_RUNNING_ON_CPU


def _decide_chunk_size(
    options: EngineOptions,
    device: DeviceName,
    gpu: Gpu | None,
    context_len: int,
    reasons: dict[str, str],
) -> int:
    if options.chunk_size is None:
        if device == "cuda":
            chunk_size, reasons["chunk_size"] = default_chunk_size(gpu)
            return chunk_size
        reasons["chunk_size"] = "default on a CPU"
        return DEFAULT_CHUNK_SIZE_ON_CPU
    if options.chunk_size != -1:
        reasons["chunk_size"] = "given"
        return options.chunk_size
    if context_len > MAX_CHUNK_SIZE:
        reasons["chunk_size"] = "given as -1: the largest chunk, which is less than a context"
        return MAX_CHUNK_SIZE
    reasons["chunk_size"] = "given as -1: a whole context"
    return context_len


def _decide_payload_bytes(
    max_running: int,
    context_len: int,
    columns: dict[str, ColumnSpec],
    reasons: dict[str, str],
) -> int:
    reasons["max_payload_bytes"] = (
        "4 MiB of prompt logprobs, 4 MiB of read-outs or less where a context is less (longer ones "
        "leave in pieces), and top logprobs for max_running rows"
    )
    readouts = min(readout_bytes(context_len, columns.values()), MAX_READOUT_BYTES)
    return 2**22 + readouts + sample_score_bytes(max_running)


def _decide_num_threads(options: EngineOptions, model: ModelConfig, reasons: dict[str, str]) -> int:
    if options.num_threads is not None:
        reasons["num_threads"] = "given"
        return options.num_threads
    if model.hidden_size < 1024:
        reasons["num_threads"] = (
            "default: for a narrow model, handing work out costs more than it saves"
        )
        return 1
    reasons["num_threads"] = "default: one a core"
    return os.cpu_count() or 1


def _decide_memory_fraction(
    options: EngineOptions, device: DeviceName, reasons: dict[str, str]
) -> float | None:
    fraction = options.memory_fraction
    sizes = [name for name in ("kv_memory", "num_pages") if getattr(options, name) is not None]
    if fraction is None:
        if device == "cuda" and not sizes:
            reasons["memory_fraction"] = "default"
            return DEFAULT_MEMORY_FRACTION
        reasons["memory_fraction"] = (
            f"{' and '.join(sizes)} given" if sizes else "of a GPU's memory, and this is a CPU"
        )
        return None
    if not 0.0 < fraction < 1.0:
        raise ConfigError(
            "memory_fraction", f"is {fraction:g}; give a share between 0 and 1, such as 0.9"
        )
    if sizes:
        raise ConfigError(
            "memory_fraction",
            f"and {sizes[0]} both say how large the KV pool is; give one of them",
        )
    if device == "cpu":
        raise ConfigError(
            "memory_fraction",
            "is a share of a GPU's memory, and this engine runs on the CPU; give kv_memory",
        )
    reasons["memory_fraction"] = "given"
    return fraction


def _decide_num_pages(
    options: EngineOptions,
    gpu: Gpu | None,
    memory_fraction: float | None,
    pool: PoolShape,
    reasons: dict[str, str],
) -> int:
    if memory_fraction is not None:
        reasons["num_pages"] = (
            f"one sequence of context_len tokens, at least; memory_fraction {memory_fraction:g} "
            "decides when the engine starts, by what weights and the largest step leave"
        )
        return pool.least_pages
    if options.num_pages is not None:
        num_pages, field = options.num_pages, "num_pages"
        reasons["num_pages"] = "given"
    else:
        field, size = "kv_memory", options.kv_memory
        num_pages, reason = pages_of_size(pool, DEFAULT_KV_MEMORY if size is None else size)
        reasons["num_pages"] = reason
    check_pool(pool, num_pages, field, gpu=gpu)
    return num_pages


def with_measured_pool(config: EngineConfig, use: MemoryUse) -> EngineConfig:
    """Return a configuration whose pool fills a GPU up to its ``memory_fraction``.

    Raises:
        ConfigError: too little is left for one context; with the numbers.
    """
    assert config.memory_fraction is not None
    pool = PoolShape(
        page_size=config.page_size,
        page_bytes=kv_page_bytes(
            config.model, dtype=config.dtype, page_size=config.page_size, capture=config.capture
        ),
        context_len=config.context_len,
        max_running=config.max_running,
    )
    num_pages, reason = pages_of_fraction(pool, config.memory_fraction, use)
    return msgspec.structs.replace(
        config, num_pages=num_pages, reasons=config.reasons | {"num_pages": reason}
    )
