"""Bodies of ``/generate``, and lines of prompt files: one prompt or many, and their parameters.

Owns the fields of the dialect, and what is done with those that the engine cannot honour: a field
that would change the answer is refused by name, any other unknown field is ignored, for clients
send newer fields to older servers. Inside ``sampling_params`` nothing unknown passes: a typing
error there would silently change the policy.
"""

import uuid
from typing import Any, TypeVar, cast

import msgspec

from dovetail.core.prompts import Prompt, RequestMaker
from dovetail.errors import RequestError
from dovetail.wire.request import (
    CaptureParams,
    LogprobKind,
    LogprobParams,
    Request,
    SamplingParams,
)
from dovetail.wire.typed import typed
from dovetail.wire.validate import validated_label

UNSUPPORTED = (
    "input_embeds", "image_data", "video_data", "audio_data", "return_indexer_topk",
    "return_hidden_states", "session_params", "session_id", "lora_path", "lora_id",
    "custom_logit_processor", "bootstrap_host", "bootstrap_room",
)  # fmt: skip
"""Fields that would change the answer. Null, false and empty ask for nothing and pass."""

UNSUPPORTED_SAMPLING = (
    "json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params",
)  # fmt: skip

IGNORED_SAMPLING = ("spaces_between_special_tokens", "stream_interval")
"""Of slow tokenizers, and of the transport: no token and no text depends on them."""

T = TypeVar("T")


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True):
    """A body of ``/generate`` as it comes; fields may be lists, an entry an item of a batch.

    Attributes:
        text, input_ids, messages: exactly one: text or texts; ids or lists of ids; one chat.
        sampling_params: see ``SamplingParams``.
        rid: the client's label; made if absent.
        return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob: see
            ``LogprobParams``. Without ``return_logprob`` the others have no effect.
        logprob_kind: see ``LogprobParams``.
        return_sampling_mask: report what each draw could have drawn, and logprobs.
        return_routed_experts: report the experts of each token, in SGLang's form.
        capture, capture_interval: report columns in our own form; see ``CaptureParams``.
        capture_file: name of the client's file, which takes the columns of our own form.
        routed_experts_start_len: position of the first row, for either form.
        return_text_in_logprobs: put each token's text beside its logprob.
        return_prompt_token_ids: put the prompt's ids into the reply.
        stream: reply with server-sent events.
        group, priority: see ``Request``.
        extra_key, cache_salt: prefixes are shared only between requests with the same.
    """

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str | None] | None = None
    return_logprob: bool | list[bool | None] = False
    logprob_start_len: int | list[int | None] = -1
    top_logprobs_num: int | list[int | None] = 0
    token_ids_logprob: list[int | list[int] | None] | None = None
    logprob_kind: LogprobKind = "scaled"
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    capture: str | tuple[str, ...] = ()
    capture_interval: int = 0
    capture_file: str | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    group: str | None = None
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a call, with what was asked for it; ``logprobs`` None is none."""

    prompt: Prompt
    sampling: SamplingParams
    logprobs: LogprobParams | None
    rid: str | None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of ``/generate``.

    Attributes:
        items: at least one.
        is_batch: the prompts came as a list.
        is_list: the reply is a list: of a batch, or of several samples.
        return_routed_experts: give expert rows in SGLang's form.
        wants_columns: give captured columns in our own form.
        capture: of each item, for either form.
        capture_file: name of the file that takes the columns of our own form, if any.
        rids: the client's labels, as it gave them.
    """

    items: list[Item]
    is_batch: bool
    is_list: bool
    stream: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    return_routed_experts: bool
    wants_columns: bool
    capture: CaptureParams
    capture_file: str | None
    rids: tuple[str, ...]
    group: str | None
    priority: int
    namespace: bytes


def read_call(raw: dict[str, Any], *, max_prompts: int) -> Call:
    """Return the call that a body asks for; the prompts are not validated yet.

    Raises:
        RequestError: names the field at fault.
    """
    _refuse(raw, UNSUPPORTED, prefix="")
    fields = typed(raw, GenerateFields)
    prompts, is_batch = _prompts(fields)
    check_num("text" if fields.input_ids is None else "input_ids", len(prompts), max_prompts)
    num = len(prompts) if is_batch else None
    params = _each("sampling_params", fields.sampling_params, num, default={})
    sampling = [
        sampling_of(one, f"sampling_params[{i}]" if len(prompts) > 1 else "sampling_params")
        for i, one in enumerate(params)
    ]
    samples = {one.n for one in sampling}
    columns = (fields.capture,) if isinstance(fields.capture, str) else fields.capture
    if fields.capture_file is not None and not columns:
        raise RequestError("capture_file", "takes the columns that capture names; there are none")
    return Call(
        items=[
            Item(prompt=prompt, sampling=one, logprobs=logprobs, rid=rid)
            for prompt, one, logprobs, rid in zip(
                prompts, sampling, _logprobs(fields, num), _rids(fields, num), strict=True
            )
        ],
        is_batch=is_batch,
        is_list=is_batch or samples != {1},
        stream=fields.stream,
        return_text_in_logprobs=fields.return_text_in_logprobs,
        return_prompt_token_ids=fields.return_prompt_token_ids,
        return_routed_experts=fields.return_routed_experts,
        capture=CaptureParams(
            columns=columns + (("experts",) if fields.return_routed_experts else ()),
            start_len=fields.routed_experts_start_len,
            interval=fields.capture_interval,
        ),
        wants_columns=bool(columns),
        capture_file=fields.capture_file,
        rids=_given_rids(fields.rid),
        group=fields.group,
        priority=fields.priority,
        namespace=namespace_of(fields.extra_key, fields.cache_salt),
    )


def sampling_of(raw: dict[str, Any], prefix: str) -> SamplingParams:
    """Return native sampling parameters; null means default.

    Raises:
        RequestError: a parameter is unknown, not supported or of a wrong type; names it.
    """
    _refuse(raw, UNSUPPORTED_SAMPLING, prefix=f"{prefix}.")
    dropped = {*UNSUPPORTED_SAMPLING, *IGNORED_SAMPLING}
    given = {k: v for k, v in raw.items() if v is not None and k not in dropped}
    for name in given:
        if name not in SamplingParams.__struct_fields__:
            raise RequestError(f"{prefix}.{name}", "is no sampling parameter; correct its name")
    params = typed(given, SamplingParams, prefix=prefix)
    if params.top_k >= 2**31:  # clients say "all" with a huge number
        params = msgspec.structs.replace(params, top_k=-1)
    return params


def requests_of(call: Call, maker: RequestMaker) -> list[Request]:
    """Return a request an item; nothing is returned unless all are right.

    Raises:
        RequestError: names the field at fault in the words of the dialect, and the item of a batch.
    """
    requests: list[Request] = []
    for index, item in enumerate(call.items):
        try:
            requests.append(
                maker.make(
                    item.prompt,
                    item.sampling,
                    logprobs=item.logprobs,
                    capture=call.capture,
                    group=call.group,
                    priority=call.priority,
                    label=item.rid if item.rid is not None else uuid.uuid4().hex,
                    namespace=call.namespace,
                )
            )
        except RequestError as own_error:
            error = _renamed(own_error, call)
            where = f"in item {index} of the batch: " if call.is_batch else ""
            raise RequestError(error.field, where + error.message) from None
    return requests


def _renamed(error: RequestError, call: Call) -> RequestError:
    """Return the engine's error in the words of the dialect."""
    names = {
        "capture.start_len": "routed_experts_start_len",
        "capture.interval": "capture_interval",
    }
    if not call.wants_columns:
        names["capture"] = "return_routed_experts"
    return RequestError(names.get(error.field, error.field), error.message)


def namespace_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the prefix cache's namespace that the client's own keys make.

    Raises:
        RequestError: a key is too long to be kept with each cached prefix; names it.
    """
    validated_label("extra_key", extra_key)
    validated_label("cache_salt", cache_salt)
    if not extra_key and not cache_salt:
        return b""
    return msgspec.json.encode((extra_key, cache_salt))


def check_num(field: str, num_prompts: int, most: int) -> None:
    """Refuse a batch that can never run, before work is spent on each of its items.

    Raises:
        RequestError: names the field.
    """
    if num_prompts > most:
        raise RequestError(field, f"has {num_prompts} prompts; send at most {most} at once")


def check_ids(field: str, prompt: object) -> None:
    """Refuse objects among token ids: such a list would read as a chat. The rest is checked later.

    Raises:
        RequestError: names the field.
    """
    if isinstance(prompt, list):
        for index, item in enumerate(cast(list[object], prompt)):
            if isinstance(item, dict):
                raise RequestError(field, f"item {index} is an object, not an integer token id")


def _refuse(raw: dict[str, Any], names: tuple[str, ...], *, prefix: str) -> None:
    for name in names:
        if _asks(raw.get(name)):
            raise RequestError(
                prefix + name, "is not supported by this server; leave it out or send null"
            )


def _asks(value: object) -> bool:
    """Null, false and empty ask for nothing, and so does a list of such."""
    rest = [value]  # no recursion: clients nest as deeply as JSON lets them
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += cast(list[object], one)
        elif one is not None and one is not False and one not in ("", {}):
            return True
    return False


def _prompts(fields: GenerateFields) -> tuple[list[Prompt], bool]:
    given = {
        name: value
        for name in ("text", "input_ids", "messages")
        if (value := getattr(fields, name)) is not None
    }
    if len(given) != 1:
        names = " and ".join(given) or "none"
        raise RequestError("text", f"give one of text, input_ids and messages; there is {names}")
    [(name, value)] = given.items()
    if not value and isinstance(value, list) and name != "input_ids":
        raise RequestError(name, "is an empty list; give at least one")
    is_batch = name != "messages" and isinstance(value, list) and _is_batch(name, value)
    prompts: list[Prompt] = list(value) if is_batch else [value]
    if name == "input_ids":
        for prompt in prompts:
            check_ids(name, prompt)
    return prompts, is_batch


def _is_batch(name: str, value: list[Any]) -> bool:
    return name == "text" or any(isinstance(item, list) for item in value)


def _each(name: str, value: Any, num: int | None, *, default: T) -> list[T]:
    """Return a value an item; ``num`` None is a single prompt, which takes no list."""
    if not isinstance(value, list):
        return [default if value is None else value] * (num or 1)
    values = cast(list[Any], value)
    if num is None and len(values) != 1:
        raise RequestError(name, "is a list, but there is one prompt; give one value")
    if num is not None and len(values) != num:
        raise RequestError(name, f"has {len(values)} entries for {num} prompts")
    return [default if item is None else item for item in values]


def _rids(fields: GenerateFields, num: int | None) -> list[str | None]:
    if isinstance(fields.rid, str) and num is not None:
        return [f"{fields.rid}_{index}" for index in range(num)]
    return _each("rid", fields.rid, num, default=None)


def _given_rids(rid: str | list[str | None] | None) -> tuple[str, ...]:
    given = rid if isinstance(rid, list) else [rid]
    return tuple(one for one in given if one is not None)


def _logprobs(fields: GenerateFields, num: int | None) -> list[LogprobParams | None]:
    columns = zip(
        _each("return_logprob", fields.return_logprob, num, default=False),
        _each("logprob_start_len", fields.logprob_start_len, num, default=-1),
        _each("top_logprobs_num", fields.top_logprobs_num, num, default=0),
        _each("token_ids_logprob", _ids_of_each(fields, num), num, default=()),
        strict=True,
    )
    return [
        LogprobParams(
            kind=fields.logprob_kind,
            logprob_start_len=start,
            top_logprobs_num=num_top,
            token_ids_logprob=tuple(of_ids),
            sampling_mask=fields.return_sampling_mask,
        )
        if is_asked or fields.return_sampling_mask
        else None
        for is_asked, start, num_top, of_ids in columns
    ]


def _ids_of_each(fields: GenerateFields, num: int | None) -> list[Any] | None:
    """Return the ids to report: for each prompt a list, or None."""
    ids = fields.token_ids_logprob
    if ids is None:
        return None
    flat = [item for item in ids if isinstance(item, int)]
    if flat and len(flat) < len(ids):
        raise RequestError(
            "token_ids_logprob",
            "mixes ids with lists of them; give one list for all prompts, or a list for each",
        )
    if flat or not ids:
        return [flat] * (num or 1)
    return [item for item in ids if not isinstance(item, int)]
