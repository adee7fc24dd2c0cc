"""Requests as clients state them, and as the scheduler sees them.

Owns the shape of a request and the rules for a legal one (``validated``). Must
not know how a request is scheduled or which device serves it.

Field names follow SGLang's native ``/generate`` dialect.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import msgspec

from dovetail.errors import RequestError

MAX_SEED = 2**64 - 1
DEFAULT_MAX_NEW_TOKENS = 128
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_TEMPERATURE = 1e4
MIN_TEMPERATURE = 1e-4


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when a generation ends.

    Attributes:
        max_new_tokens: most tokens to generate; None means 128, or less where
            the context ends earlier. An explicit value that cannot fit is refused.
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the likeliest one.
        stop: strings that end the generation; matched over bytes, not tokens.
        stop_token_ids: token ids that end the generation.
        sampling_seed: 64-bit seed; None draws one from the operating system
            (the seed used is reported in the result).
        ignore_eos: go on past the model's end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        no_stop_trim: keep the matched stop in the text.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whichever way they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation as a client asks for it: a line of ``--prompts``, a ``/generate`` body.

    Exactly one of ``text``, ``input_ids`` and ``messages`` is given.

    Attributes:
        text: the prompt as text.
        input_ids: the prompt as token ids.
        messages: a chat, rendered with the model's chat template.
        sampling_params: see ``SamplingParams``.
        return_logprob: include the chosen tokens' logprobs in the reply.
        rid: the client's own label; returned, never interpreted.
    """

    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    rid: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request: every field decided, bounded and finite.

    Attributes:
        request_id: made by the engine; unique for its lifetime.
        prompt_token_ids: at least one id, each in ``[0, vocab_size)``.
        sampling: validated; ``max_new_tokens`` is a number here.
        seed: the 64-bit seed of this request's noise.
        namespace: opaque prefix-cache namespace (weights epoch, adapter, salt);
            prefixes are shared only inside one namespace.
        capture: per-token columns to hand back with the last event.
        label: the client's own id, or None; never a key.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    namespace: bytes = b""
    capture: tuple[str, ...] = ()
    label: str | None = None

    @property
    def max_new_tokens(self) -> int:
        """The decided limit of generated tokens."""
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model and an engine configuration can take.

    Attributes:
        vocab_size: number of legal token ids.
        context_len: most tokens of prompt and output together.
    """

    vocab_size: int
    context_len: int


def validated_prompt(prompt_token_ids: Iterable[SupportsIndex], limits: Limits) -> tuple[int, ...]:
    """Return the prompt as a tuple of plain ints.

    Raises:
        RequestError: the prompt is empty, too long, or holds something that is
            not a token id of this model; the message names the position.
    """
    field = "input_ids"
    if isinstance(prompt_token_ids, (str, bytes)) or not hasattr(prompt_token_ids, "__iter__"):
        raise RequestError(field, "must be a list of token ids")
    ids: list[int] = []
    for index, value in enumerate(prompt_token_ids):
        try:
            if isinstance(value, bool):
                raise TypeError
            token_id = operator.index(value)  # of any integer type
        except TypeError:
            raise RequestError(
                field, f"item {index} is {value!r}, not an integer token id"
            ) from None
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                field, f"item {index} is {token_id}; legal ids are 0 to {limits.vocab_size - 1}"
            )
        ids.append(token_id)
    if not ids:
        raise RequestError(field, "the prompt is empty; give at least one token")
    if len(ids) >= limits.context_len:
        raise RequestError(
            field,
            f"the prompt has {len(ids)} tokens and leaves no room for output in the "
            f"context length of {limits.context_len}; shorten it",
        )
    return tuple(ids)


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
    try:
        # msgspec checks types only when it decodes, so what Python code built is decoded once.
        sampling = msgspec.convert(msgspec.structs.asdict(sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise RequestError("sampling_params", str(error)) from None
    _check_number("temperature", sampling.temperature, low=0.0, high=MAX_TEMPERATURE)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise RequestError(
            "sampling_params.temperature",
            f"is {sampling.temperature}; give 0 for greedy decoding or at least {MIN_TEMPERATURE}",
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
    _check_stops(sampling, limits)
    return msgspec.structs.replace(
        sampling, max_new_tokens=_decided_max_new_tokens(sampling, prompt_len, limits)
    )


def _decided_max_new_tokens(sampling: SamplingParams, prompt_len: int, limits: Limits) -> int:
    room = limits.context_len - prompt_len
    asked = sampling.max_new_tokens
    if asked is None:
        return min(DEFAULT_MAX_NEW_TOKENS, room)
    field = "sampling_params.max_new_tokens"
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
    for index, token_id in enumerate(sampling.stop_token_ids or ()):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                "sampling_params.stop_token_ids",
                f"item {index} is {token_id}; legal ids are 0 to {limits.vocab_size - 1}",
            )
