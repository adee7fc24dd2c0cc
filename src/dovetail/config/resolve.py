"""From what was typed to what is decided. The only maker of ``EngineConfig``.

Must not touch a device: facts about one are passed in.
"""

import os
import re

import msgspec

from dovetail.config.capture import ColumnSpec, checked_capture, column_specs
from dovetail.config.hub import locate_model
from dovetail.config.model import ModelConfig
from dovetail.config.payload import readout_bytes, sample_score_bytes
from dovetail.config.schema import DTypeName, EngineConfig, EngineOptions
from dovetail.errors import ConfigError
from dovetail.wire.typed import field_and_message

MAX_CHUNK_SIZE = 2**20
"""Buffers hold a whole chunk, whether or not one ever comes."""

MAX_CUDA_RUNNING = 4095
MIN_CUDA_HEAD_DIM = 16

MAX_READOUT_BYTES = 2**22
"""Kept free for read-outs: what a step copies for one request, the others wait for."""

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}


def parse_bytes(field: str, value: int | str) -> int:
    """Return a number of bytes from ``1048576``, ``"512MiB"`` or ``"1.5GB"``.

    Raises:
        ConfigError: not a positive size; the message shows the accepted forms.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(field, f"{value!r} is not a size; write bytes, 512MiB or 2GB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ConfigError(field, f"{value!r} is no memory at all")
    return size


def kv_page_bytes(
    model: ModelConfig, *, dtype: DTypeName, page_size: int, capture: tuple[str, ...] = ()
) -> int:
    """Return the bytes of one page: keys and values of all layers, and the captured columns."""
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES_PER_ELEMENT[dtype]
    rows = sum(spec.row_bytes for spec in column_specs(model, capture).values())
    return page_size * (kv + rows)


def resolve(options: EngineOptions) -> EngineConfig:
    """Decide every value that the user left open, and check the whole.

    Raises:
        ConfigError: the model cannot be found, an option is out of range, or the options
            contradict each other or the model; names the option and the numbers.
    """
    _check_ranges(options)
    reasons: dict[str, str] = {}
    folder, reasons["model_folder"] = locate_model(options.model)
    model = ModelConfig.from_folder(folder)
    if options.device == "cuda":
        _check_cuda(options, model)
    dtype = _decide_dtype(options, model, reasons)
    context_len = _decide_context_len(options, model, reasons)
    capture = checked_capture(options.capture, model)
    page_bytes = kv_page_bytes(model, dtype=dtype, page_size=options.page_size, capture=capture)
    num_pages = _decide_num_pages(options, page_bytes, context_len, reasons)
    depth = 1 if options.depth is None else options.depth
    reasons["depth"] = "default: overlap" if options.depth is None else "given"
    chunk_size = _decide_chunk_size(options, context_len, reasons)
    reasons["max_step_tokens"] = "chunk_size + max_running: a chunk beside a full decode batch"
    for name in (
        "device", "page_size", "max_running", "max_queued", "policy", "prefix_cache", "capture",
        "lanes", "load_format", "graphs",
    ):  # fmt: skip
        reasons[name] = _given(options, name)
    return EngineConfig(
        model_folder=str(folder.resolve()),
        model=model,
        dtype=dtype,
        device=options.device,
        depth=depth,
        page_size=options.page_size,
        num_pages=num_pages,
        context_len=context_len,
        max_running=options.max_running,
        max_queued=options.max_queued,
        chunk_size=chunk_size,
        max_step_tokens=chunk_size + options.max_running,
        max_payload_bytes=_decide_payload_bytes(
            options, context_len, column_specs(model, capture), reasons
        ),
        policy=options.policy,
        prefix_cache=options.prefix_cache,
        capture=capture,
        num_threads=_decide_num_threads(options, model, reasons),
        lanes=options.lanes,
        load_format=options.load_format,
        graphs=options.graphs,
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
    if options.chunk_size != -1 and options.chunk_size < 1:
        raise ConfigError(
            "chunk_size", f"is {options.chunk_size}; give at least 1, or -1 for no limit"
        )
    if options.chunk_size > MAX_CHUNK_SIZE:
        raise ConfigError(
            "chunk_size", f"is {options.chunk_size}; give at most {MAX_CHUNK_SIZE}, or -1"
        )


def _check_cuda(options: EngineOptions, model: ModelConfig) -> None:
    """Refuse what the GPU's kernels cannot do."""
    if options.lanes != "inline":
        raise ConfigError("lanes", "are CUDA streams on a GPU; leave out --lanes")
    if options.max_running > MAX_CUDA_RUNNING:
        raise ConfigError(
            "max_running",
            f"is {options.max_running}; on a GPU one kernel goes through all rows of a step, so "
            f"give at most {MAX_CUDA_RUNNING}",
        )
    if not _is_power_of_two(options.page_size):
        raise ConfigError(
            "page_size", f"is {options.page_size}; on a GPU it must be a power of two, such as 16"
        )
    if model.head_dim < MIN_CUDA_HEAD_DIM or not _is_power_of_two(model.head_dim):
        raise ConfigError(
            "model",
            f"has heads of {model.head_dim} dimensions; the GPU's kernels take powers of two from "
            f"{MIN_CUDA_HEAD_DIM} on, so run it with --device cpu",
        )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _decide_dtype(options: EngineOptions, model: ModelConfig, reasons: dict[str, str]) -> DTypeName:
    if options.dtype != "auto":
        reasons["dtype"] = "given"
        return options.dtype
    if options.device == "cuda":
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


def _decide_chunk_size(options: EngineOptions, context_len: int, reasons: dict[str, str]) -> int:
    if options.chunk_size != -1:
        reasons["chunk_size"] = _given(options, "chunk_size")
        return options.chunk_size
    if context_len > MAX_CHUNK_SIZE:
        reasons["chunk_size"] = "given as -1: the largest chunk, which is less than a context"
        return MAX_CHUNK_SIZE
    reasons["chunk_size"] = "given as -1: a whole context"
    return context_len


def _decide_payload_bytes(
    options: EngineOptions,
    context_len: int,
    columns: dict[str, ColumnSpec],
    reasons: dict[str, str],
) -> int:
    reasons["max_payload_bytes"] = (
        "4 MiB of prompt logprobs, 4 MiB of read-outs or less where a context is less (longer ones "
        "leave in pieces), and top logprobs for max_running rows"
    )
    readouts = min(readout_bytes(context_len, columns.values()), MAX_READOUT_BYTES)
    return 2**22 + readouts + sample_score_bytes(options.max_running)


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


def _decide_num_pages(
    options: EngineOptions, page_bytes: int, context_len: int, reasons: dict[str, str]
) -> int:
    if options.num_pages is not None:
        num_pages, field = options.num_pages, "num_pages"
        reasons["num_pages"] = "given"
    else:
        budget, field = parse_bytes("kv_memory", options.kv_memory), "kv_memory"
        most = options.max_running * -(-context_len // options.page_size)
        num_pages = min(budget // page_bytes, most)
        reasons["num_pages"] = (
            f"kv_memory {options.kv_memory} at {page_bytes} bytes a page"
            if num_pages < most
            else "max_running sequences of context_len tokens; kv_memory would hold more"
        )
    if num_pages * options.page_size < context_len:
        need = -(-context_len // options.page_size)
        raise ConfigError(
            field,
            f"gives {num_pages} pages of {options.page_size} tokens, but one sequence of "
            f"context_len {context_len} needs {need} pages ({need * page_bytes} bytes); "
            "raise it or lower context_len",
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if options.device == "cpu" and num_pages * page_bytes > memory:
        raise ConfigError(
            field,
            f"asks for {num_pages * page_bytes} bytes of KV, but this machine has {memory}; "
            f"give at most {memory // page_bytes} pages",
        )
    return num_pages
