"""The rules for a legal request. Admission is total: past here every field is bounded and finite.

Owns what is refused and the words in which: each error names the field and the fix.
"""

import math
import operator
import reprlib
from collections.abc import Iterable, Sized
from typing import SupportsIndex

import msgspec

from dovetail.errors import RequestError
from dovetail.wire.capture import COLUMNS
from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams
from dovetail.wire.typed import typed

MAX_SEED = 2**64 - 1
DEFAULT_MAX_NEW_TOKENS = 128
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_TEMPERATURE = 1e4
MIN_TEMPERATURE = 1e-4
MAX_LOGIT_BIASES = 512
MAX_BIAS = 1e4
MAX_TOP_LOGPROBS = 128
MAX_SAMPLES = 1024
MAX_MASK_IDS = 512
"""Most tokens of a sampling mask; a draw with more ends its request with an error."""
MAX_LABEL_LEN = 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model and an engine configuration can take.

    Attributes:
        vocab_size: number of legal token ids.
        context_len: most tokens of prompt and output together.
        columns: per-token columns that the engine captures.
    """

    vocab_size: int
    context_len: int
    columns: tuple[str, ...] = ("tokens",)


def validated_prompt(prompt_token_ids: Iterable[SupportsIndex], limits: Limits) -> tuple[int, ...]:
    """Return the prompt as a tuple of plain ints.

    Raises:
        RequestError: the prompt is empty, too long, or holds something that is
            not a token id of this model; the message names the position.
    """
    field = "input_ids"
    is_number = getattr(prompt_token_ids, "ndim", None) == 0  # an array, and yet without items
    has_items = hasattr(prompt_token_ids, "__iter__") and not is_number
    if isinstance(prompt_token_ids, (str, bytes)) or not has_items:
        raise RequestError(field, "must be a list of token ids")
    if isinstance(prompt_token_ids, Sized):  # before each of what may be millions is looked at
        _check_prompt_len(len(prompt_token_ids), limits)
    ids: list[int] = []
    for index, value in enumerate(prompt_token_ids):
        try:
            if isinstance(value, bool):
                raise TypeError
            token_id = operator.index(value)  # of any integer type
        except TypeError:
            raise RequestError(
                field, f"item {index} is {reprlib.repr(value)}, not an integer token id"
            ) from None
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                field, f"item {index} is {token_id}; legal ids are 0 to {limits.vocab_size - 1}"
            )
        ids.append(token_id)
    if not ids:
        raise RequestError(field, "the prompt is empty; give at least one token")
    _check_prompt_len(len(ids), limits)
    return tuple(ids)


def _check_prompt_len(num_tokens: int, limits: Limits) -> None:
    if num_tokens > limits.context_len:
        raise RequestError(
            "input_ids",
            f"the prompt has {num_tokens} tokens, more than the context length of "
            f"{limits.context_len}; shorten it",
        )


def validated_sampling(
    sampling: SamplingParams, *, prompt_len: int, limits: Limits
) -> SamplingParams:
    """Return the parameters with every value bounded and ``max_new_tokens`` decided.

    Raises:
        RequestError: a value is of the wrong type, not finite or out of range;
            the message names the field and the legal range.
    """
    if type(sampling) is not SamplingParams:
        raise RequestError("sampling_params", "must be a dovetail.SamplingParams")
    # msgspec checks types only when it decodes, so what Python code built is decoded once.
    fields = msgspec.structs.asdict(sampling)
    sampling = typed(fields, SamplingParams, prefix="sampling_params", strict=True)
    _check_numbers(sampling)
    _check_stops(sampling, limits)
    _check_biases(sampling, limits)
    max_new_tokens = _decided_max_new_tokens(sampling, prompt_len, limits)
    if not 0 <= sampling.min_new_tokens <= max_new_tokens:
        raise RequestError(
            "sampling_params.min_new_tokens",
            f"is {sampling.min_new_tokens}; the legal range is 0 to max_new_tokens, "
            f"here {max_new_tokens}",
        )
    return msgspec.structs.replace(sampling, max_new_tokens=max_new_tokens)


def validated_logprobs(
    logprobs: LogprobParams, *, prompt_len: int, limits: Limits
) -> LogprobParams:
    """Return the parameters with every value bounded.

    Raises:
        RequestError: names the field and the legal range.
    """
    if type(logprobs) is not LogprobParams:
        raise RequestError("logprobs", "must be a dovetail.LogprobParams")
    fields = msgspec.structs.asdict(logprobs)
    logprobs = typed(fields, LogprobParams, prefix="logprobs", strict=True)
    if not -1 <= logprobs.logprob_start_len <= prompt_len:
        raise RequestError(
            "logprob_start_len",
            f"is {logprobs.logprob_start_len}; give -1 for none, or 0 to {prompt_len}",
        )
    if not 0 <= logprobs.top_logprobs_num <= min(MAX_TOP_LOGPROBS, limits.vocab_size):
        raise RequestError(
            "top_logprobs_num",
            f"is {logprobs.top_logprobs_num}; the legal range is 0 to "
            f"{min(MAX_TOP_LOGPROBS, limits.vocab_size)}",
        )
    if len(logprobs.token_ids_logprob) > MAX_TOP_LOGPROBS:
        raise RequestError(
            "token_ids_logprob",
            f"has {len(logprobs.token_ids_logprob)} ids; at most {MAX_TOP_LOGPROBS} are allowed",
        )
    _check_ids("token_ids_logprob", logprobs.token_ids_logprob, limits)
    if logprobs.kind == "truncated" and logprobs.logprob_start_len >= 0:
        raise RequestError(
            "logprob_start_len",
            "prompt tokens were not drawn from a truncated distribution; "
            "ask for kind scaled or raw",
        )
    return logprobs


def validated_capture(capture: CaptureParams, *, prompt_len: int, limits: Limits) -> CaptureParams:
    """Return the parameters, without repeated columns.

    Raises:
        RequestError: names the field and the fix.
    """
    fields = msgspec.structs.asdict(capture)
    capture = typed(fields, CaptureParams, prefix="capture", strict=True)
    for name in capture.columns:
        if name not in COLUMNS:
            raise RequestError(
                "capture", f"{name!r} is no column; the columns are {', '.join(COLUMNS)}"
            )
        if name not in limits.columns:
            wanted = ",".join([*limits.columns[1:], name])  # the first, tokens, is always there
            raise RequestError(
                "capture",
                f"{name!r} is not captured by this engine, only {', '.join(limits.columns)}; start "
                f"it with --capture {wanted}",
            )
    if not 0 <= capture.start_len <= prompt_len:
        raise RequestError(
            "capture.start_len",
            f"is {capture.start_len}; the legal range is 0 to the length of the prompt, "
            f"{prompt_len}",
        )
    if not 0 <= capture.interval < 2**31:
        raise RequestError("capture.interval", f"is {capture.interval}; give 0 or a number of rows")
    return msgspec.structs.replace(capture, columns=tuple(dict.fromkeys(capture.columns)))


def validated_label(field: str, label: str | None) -> str | None:
    """Return the label of a request or of a group of them.

    Raises:
        RequestError: it is no text, none that can be written as UTF-8, or too long.
    """
    if label is None:
        return None
    if type(label) is not str:
        raise RequestError(field, f"is {label!r}; give a text")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise RequestError(field, "is not valid Unicode text") from None
    if len(label) > MAX_LABEL_LEN:
        raise RequestError(
            field, f"has {len(label)} characters; at most {MAX_LABEL_LEN} are allowed"
        )
    return label


def _check_numbers(sampling: SamplingParams) -> None:
    temperature = sampling.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RequestError(
            "sampling_params.temperature",
            f"is {temperature}; the legal range is {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
            "or 0 for greedy decoding",
        )
    _check_number("top_p", sampling.top_p, low=0.0, high=1.0, open_low=True)
    _check_number("min_p", sampling.min_p, low=0.0, high=1.0)
    if sampling.top_k != -1 and not 1 <= sampling.top_k < 2**31:
        raise RequestError(
            "sampling_params.top_k", f"is {sampling.top_k}; give -1 (all) or at least 1"
        )
    if sampling.sampling_seed is not None and not 0 <= sampling.sampling_seed <= MAX_SEED:
        raise RequestError(
            "sampling_params.sampling_seed", f"is {sampling.sampling_seed}; legal are 0 to 2**64-1"
        )
    _check_number("repetition_penalty", sampling.repetition_penalty, low=0.01, high=100.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, low=-100.0, high=100.0)
    _check_number("presence_penalty", sampling.presence_penalty, low=-100.0, high=100.0)
    if not 1 <= sampling.n <= MAX_SAMPLES:
        raise RequestError(
            "sampling_params.n", f"is {sampling.n}; the legal range is 1 to {MAX_SAMPLES}"
        )


def _decided_max_new_tokens(sampling: SamplingParams, prompt_len: int, limits: Limits) -> int:
    room = limits.context_len - prompt_len
    asked = sampling.max_new_tokens
    field = "sampling_params.max_new_tokens"
    if asked is None:
        if room == 0:
            raise RequestError(
                field,
                f"the prompt fills the context length of {limits.context_len}; shorten it, or "
                "give 0 to score it",
            )
        return min(DEFAULT_MAX_NEW_TOKENS, room)
    if asked < 0:
        raise RequestError(field, f"is {asked}; it cannot be negative")
    if asked > room:
        raise RequestError(
            field,
            f"is {asked}, but the prompt has {prompt_len} tokens and the context length is "
            f"{limits.context_len}; give at most {room}",
        )
    return asked


def _check_number(
    name: str, value: float, *, low: float, high: float, open_low: bool = False
) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(
            f"sampling_params.{name}", f"is {value}; the legal range is {left}{low:g}, {high:g}]"
        )


def _check_stops(sampling: SamplingParams, limits: Limits) -> None:
    stops = sampling.stop_strings
    if len(stops) > MAX_STOPS:
        raise RequestError(
            "sampling_params.stop", f"has {len(stops)} strings; at most {MAX_STOPS} are allowed"
        )
    for index, text in enumerate(stops):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(
                "sampling_params.stop", f"item {index} is not valid Unicode text"
            ) from None
        if not 1 <= size <= MAX_STOP_BYTES:
            raise RequestError(
                "sampling_params.stop",
                f"item {index} has {size} bytes; the legal range is 1 to {MAX_STOP_BYTES}",
            )
    if len(sampling.stop_token_ids or ()) > MAX_STOPS:
        raise RequestError(
            "sampling_params.stop_token_ids",
            f"has {len(sampling.stop_token_ids or ())} ids; at most {MAX_STOPS} are allowed",
        )
    _check_ids("sampling_params.stop_token_ids", sampling.stop_token_ids or (), limits)


def _check_biases(sampling: SamplingParams, limits: Limits) -> None:
    field, biases = "sampling_params.logit_bias", sampling.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(field, f"has {len(biases)} ids; at most {MAX_LOGIT_BIASES} are allowed")
    _check_ids(field, biases, limits)
    for token_id, bias in biases.items():
        if not abs(bias) <= MAX_BIAS:  # also refuses NaN
            raise RequestError(
                field,
                f"is {bias} for id {token_id}; the legal range is {-MAX_BIAS:g} to {MAX_BIAS:g}",
            )


def _check_ids(field: str, token_ids: Iterable[int], limits: Limits) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                field, f"item {index} is {token_id}; legal ids are 0 to {limits.vocab_size - 1}"
            )
