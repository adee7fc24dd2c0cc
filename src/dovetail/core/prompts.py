"""From what a user calls a prompt to validated requests.

Owns the reading of prompts: text, token ids or chat messages, one or many. Must not
know the loop.
"""

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from dovetail.errors import RequestError
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import CaptureParams, LogprobParams, Request, SamplingParams
from dovetail.wire.validate import (
    Limits,
    validated_capture,
    validated_label,
    validated_logprobs,
    validated_prompt,
    validated_sampling,
)

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with role and content."""

Capture = CaptureParams | Sequence[str]
"""What to capture: the name of a column, several, or those and more."""


def capture_of(capture: Capture) -> CaptureParams:
    """Return what a user names as parameters; not validated."""
    if isinstance(capture, CaptureParams):
        return capture
    if isinstance(capture, str):
        return CaptureParams(columns=(capture,))
    if not hasattr(capture, "__iter__"):
        raise RequestError("capture", f"is {capture!r}; give names of columns")
    return CaptureParams(columns=tuple(capture))


class RequestMaker:
    """Makes requests for one model; thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        limits: Limits,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._limits = limits
        self._ids: Iterator[int] = itertools.count(1)

    def make(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
        label: str | None = None,
        namespace: bytes = b"",
    ) -> Request:
        """Return the validated request for one prompt; see ``Request`` for the fields.

        Raises:
            RequestError: names the field at fault.
        """
        prompt_token_ids = validated_prompt(self.encode(prompt), self._limits)
        sampling = validated_sampling(
            SamplingParams() if sampling_params is None else sampling_params,
            prompt_len=len(prompt_token_ids),
            limits=self._limits,
        )
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise RequestError("priority", f"is {priority!r}; give an integer of 32 bits")
        seed = sampling.sampling_seed
        return Request(
            request_id=next(self._ids),
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=secrets.randbits(64) if seed is None else seed,
            namespace=namespace,
            logprobs=validated_logprobs(
                logprobs or LogprobParams(),
                prompt_len=len(prompt_token_ids),
                limits=self._limits,
            ),
            group=validated_label("group", group),
            priority=priority,
            capture=validated_capture(
                capture_of(capture), prompt_len=len(prompt_token_ids), limits=self._limits
            ),
            label=validated_label("rid", label),
        )

    def make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """Return a request per prompt; nothing is returned unless all are right."""
        many = _as_many(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(many)
        elif isinstance(sampling_params, Mapping) or not hasattr(sampling_params, "__iter__"):
            raise RequestError(
                "sampling_params",
                "must be a SamplingParams, or a list of them; of a dict make one by "
                "SamplingParams(**fields)",
            )
        else:
            params = list(sampling_params)
            if len(params) != len(many):
                raise RequestError(
                    "sampling_params", f"has {len(params)} entries for {len(many)} prompts"
                )
        makers = [
            partial(
                self.make,
                prompt,
                sampling,
                logprobs=logprobs,
                capture=capture,
                group=group,
                priority=priority,
            )
            for prompt, sampling in zip(many, params, strict=True)
        ]
        return _made("prompts", makers)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt in any of its forms; not validated."""
        if isinstance(prompt, str):
            self._check_len("text", prompt)
            token_ids = self._tokenizer.encode(prompt)
            if not token_ids:
                raise RequestError("text", "the prompt is empty; give at least one character")
            return token_ids
        # Not any sequence: what is no prompt at all comes here too, and is validated later.
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def encode_chat(
        self,
        messages: Sequence[Any],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        """Return the token ids of a chat; not validated.

        Args:
            messages: with a role and a content each.
            template_kwargs: further variables of the model's template.
        """
        if self._chat_template is None:
            raise RequestError(
                "messages", "this model has no chat template; give text or input_ids"
            )
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError("messages", f"item {index} must be an object")
        plain = [_with_text(index, message) for index, message in enumerate(messages)]
        text = self._chat_template.render(plain, **(template_kwargs or {}))
        self._check_len("messages", text)
        # The template writes the special tokens itself, so none are added here.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_len(self, field: str, text: str) -> None:
        """Refuse what cannot fit before it is made tokens, which takes seconds a megabyte."""
        context_len = self._limits.context_len
        if len(text) > context_len * self._tokenizer.longest_token:
            raise RequestError(
                field,
                f"the prompt has {len(text)} characters, more than the context length of "
                f"{context_len} tokens can hold; shorten it",
            )


def _with_text(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts joined by newlines: templates expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for place, part in enumerate(cast(list[Any], content)):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise RequestError(
                    f"messages[{index}].content[{place}]",
                    'is no text part; this engine takes {"type": "text", "text": ...} alone',
                )
    return {**message, "content": "\n".join(texts)}


def _made(name: str, makers: Sequence[Callable[[], Request]]) -> list[Request]:
    """Return what the makers make; of several, an error names the one at fault."""
    requests: list[Request] = []
    for index, make in enumerate(makers):
        try:
            requests.append(make())
        except RequestError as error:
            if len(makers) == 1:
                raise
            raise RequestError(f"{name}[{index}].{error.field}", error.message) from None
    return requests


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of prompts? A list of ints or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    # Bytes are no ids, and a lone chat message is no list of its keys.
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not hasattr(prompts, "__iter__"):
        raise RequestError("prompts", "must be text, token ids, a list of chat messages or a list")
    many = list(prompts)  # arrays of ids and generators become lists
    if not many:
        raise RequestError("prompts", "the list of prompts is empty")
    is_one = all(map(_is_part, many))
    return [many] if is_one else many  # type: ignore[list-item,return-value]


def _is_part(item: object) -> bool:
    """Numbers, of an array too, and messages are parts of a prompt; texts, lists, rows are one."""
    is_number = not hasattr(item, "__len__") or getattr(item, "ndim", None) == 0
    return is_number or isinstance(item, Mapping)
