"""Bodies of OpenAI's routes, as typed fields.

Owns the fields, which of them the engine cannot honour, and what they mean in the engine's words.
Here sampling parameters stand beside all others, so an unknown field is refused: a typing error
would silently change the policy.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dovetail.errors import RequestError
from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams
from dovetail.wire.typed import typed

IGNORED = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "tool_choice", "modalities", "prediction",
    "separate_reasoning", "stream_reasoning", "log_metrics",
)  # fmt: skip
"""Known, and without effect on the answer here. ``tool_choice`` counts only with tools."""

UNSUPPORTED = (
    "tools", "functions", "function_call", "response_format", "reasoning_effort", "audio",
    "web_search_options", "suffix", "best_of", "json_schema", "regex", "ebnf", "structural_tag",
    "lora_path", "session_params", "custom_logit_processor", "custom_params",
    "return_hidden_states", "return_meta_info", "return_token_ids",
    "return_prompt_token_ids", "continue_final_message", "input_ids", "stop_regex",
)  # fmt: skip

_RENAMED = {
    "sampling_params.max_new_tokens": "max_tokens",
    "sampling_params.min_new_tokens": "min_tokens",
    "sampling_params.sampling_seed": "seed",
    "capture": "return_routed_experts",
    "capture.start_len": "routed_experts_start_len",
}
OF_CHATS = {"text": "messages", "input_ids": "messages", "top_logprobs_num": "top_logprobs"}
OF_COMPLETIONS = {"text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
"""What each route calls the engine's fields."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of both routes; null means default.

    Attributes:
        max_tokens, max_completion_tokens: most tokens to generate; the second wins. The default is
            the rest of the context for chats, and 16 for completions.
        logit_bias: token id -> number added to its logit.
        seed: 64-bit seed.
        top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
            skip_special_tokens, no_stop_trim: extras; see ``SamplingParams``.

    The others are OpenAI's, and mean what they mean in ``SamplingParams``.
    """

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        """Return the engine's parameters; ``default_max_tokens`` None lets the engine decide."""
        limits = (self.max_completion_tokens, self.max_tokens, default_max_tokens)
        return SamplingParams(
            max_new_tokens=next((limit for limit in limits if limit is not None), None),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=-1 if self.top_k >= 2**31 else self.top_k,
            min_p=self.min_p,
            n=self.n,
            stop=self.stop,
            sampling_seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_new_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim,
        )


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside its choices; null is no.

    Attributes:
        include_usage: end with an event that has the usage and no choice.
        continuous_usage_stats: give each event the usage so far.
        include_obfuscation: OpenAI's padding of events; there is none here.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take beside sampling parameters.

    Attributes:
        model: must be the served one; absent is that one.
        stream, stream_options: reply with server-sent events.
        rid: the client's label, for ``/abort_request``.
        priority: see ``Request``.
        extra_key, cache_salt: prefixes are shared only between requests with the same.
        return_routed_experts, routed_experts_start_len: as for ``/generate``.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0

    @property
    def capture(self) -> CaptureParams:
        """Which columns the engine is asked for."""
        columns = ("experts",) if self.return_routed_experts else ()
        return CaptureParams(columns=columns, start_len=self.routed_experts_start_len)


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """What only chats take.

    Attributes:
        messages: role and content each; a content is text or a list of text parts.
        logprobs: report the chosen tokens' logprobs.
        top_logprobs: and those of the likeliest, this many.
        chat_template_kwargs: further variables of the model's template.
    """

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked(self) -> LogprobParams | None:
        """Return which logprobs are asked for; None is none."""
        if self.logprobs:
            return LogprobParams(top_logprobs_num=self.top_logprobs or 0)
        if self.top_logprobs:
            raise RequestError("top_logprobs", "needs logprobs: true")
        return None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """What only completions take.

    Attributes:
        prompt: text, texts, token ids, or lists of token ids.
        echo: begin the reply with the prompt.
        logprobs: report logprobs, and those of this many likeliest tokens.
    """

    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None

    def asked(self) -> LogprobParams | None:
        """Return which logprobs are asked for; None is none."""
        if self.logprobs is None:
            return None
        return LogprobParams(
            top_logprobs_num=self.logprobs, logprob_start_len=0 if self.echo else -1
        )


def read_chat(raw: dict[str, Any]) -> tuple[CallFields, SamplingFields, ChatFields]:
    """Return the fields of a chat's body.

    Raises:
        RequestError: names the field at fault.
    """
    _check_names(raw, ChatFields)
    chat = typed(raw, ChatFields)
    return typed(raw, CallFields), typed(raw, SamplingFields), chat


def read_completion(raw: dict[str, Any]) -> tuple[CallFields, SamplingFields, CompletionFields]:
    """Return the fields of a completion's body; errors as for ``read_chat``."""
    _check_names(raw, CompletionFields)
    return typed(raw, CallFields), typed(raw, SamplingFields), typed(raw, CompletionFields)


def renamed(
    error: RequestError, of_route: Mapping[str, str], sampling: SamplingFields
) -> RequestError:
    """Return the engine's error in the words of a route, and of what was given of two spellings."""
    names = {**_RENAMED, **of_route}
    if sampling.max_completion_tokens is not None:
        names["sampling_params.max_new_tokens"] = "max_completion_tokens"
    field = names.get(error.field, error.field.removeprefix("sampling_params."))
    limit = names["sampling_params.max_new_tokens"]
    return RequestError(field, error.message.replace("max_new_tokens", limit))


def _check_names(raw: dict[str, Any], own: type[msgspec.Struct]) -> None:
    kinds = (own, SamplingFields, CallFields)
    known = {name for kind in kinds for name in kind.__struct_fields__}
    for name, value in raw.items():
        if name in known or name in IGNORED or _asks_nothing(name, value):
            continue
        if name in UNSUPPORTED:
            raise RequestError(name, "is not supported by this server; leave it out")
        raise RequestError(name, "is no field of this route; correct its name or leave it out")


def _asks_nothing(name: str, value: object) -> bool:
    if name == "response_format":
        return value == {"type": "text"}
    if name == "best_of":
        return value == 1
    return value is False or value in ("", [], {})
