"""``/v1/completions``."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from dovetail.core.client import EngineClient
from dovetail.core.generation import Generation, StreamEvent, prompt_columns, top_pairs
from dovetail.core.prompts import Prompt
from dovetail.errors import RequestError
from dovetail.server.body import off_loop, read_body
from dovetail.server.native_body import check_ids, check_num, namespace_of
from dovetail.server.openai.answers import Answers
from dovetail.server.openai.body import (
    OF_COMPLETIONS,
    CallFields,
    CompletionFields,
    SamplingFields,
    read_completion,
    renamed,
)
from dovetail.server.openai.logprobs import CompletionLogprobs, Top
from dovetail.server.openai.models import check_model
from dovetail.server.reply_limit import check_listed
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import EventStream, WholeReply
from dovetail.server.traffic import Traffic
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import Request

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRoute:
    """The route over one engine."""

    def __init__(self, client: EngineClient, traffic: Traffic, settings: ServerSettings) -> None:
        self._client = client
        self._traffic = traffic
        self._settings = settings

    async def complete(self, http: HttpRequest) -> WholeReply | EventStream:
        """Complete one prompt or many."""
        body = await read_body(http, self._settings)
        call, sampling, fields = await off_loop(
            body.num_bytes, lambda: read_completion(body.fields)
        )
        check_model(call.model, self._settings.model_name)
        try:
            requests = await off_loop(
                body.num_bytes, lambda: self._requests(call, sampling, fields)
            )
        except RequestError as error:
            raise renamed(error, OF_COMPLETIONS, sampling) from None
        choices = CompletionChoices(
            self._client.tokenizer,
            self._echoes(fields, requests) if fields.echo else [],
            with_logprobs=fields.logprobs is not None,
        )
        num_layers = self._client.config.model.num_layers
        answers = Answers(call, self._settings.model_name, requests, choices, num_layers=num_layers)
        if call.stream:
            return EventStream(answers.stream(self._traffic))
        return WholeReply(answers.whole(self._traffic), "application/json")

    def _requests(
        self, call: CallFields, sampling: SamplingFields, fields: CompletionFields
    ) -> list[Request]:
        prompts, asked = _prompts(fields.prompt), fields.asked()
        check_num("prompt", len(prompts), self._client.config.max_open)
        requests: list[Request] = []
        for index, prompt in enumerate(prompts):
            try:
                token_ids = self._client.requests.encode(prompt)
                requests.append(
                    self._client.requests.make(
                        token_ids,
                        sampling.params(self._default_max_tokens(token_ids)),
                        logprobs=asked,
                        capture=call.capture,
                        priority=call.priority,
                        label=call.rid,
                        namespace=namespace_of(call.extra_key, call.cache_salt),
                    )
                )
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(error.field, f"in prompt {index}: {error.message}") from None
        check_listed(requests)
        return requests

    def _default_max_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Return OpenAI's default, or what the context leaves; None if that is nothing.

        The prompt is not validated yet, and may be anything.
        """
        prompt_len = len(token_ids) if isinstance(token_ids, Sequence) else 0
        room = self._client.config.context_len - prompt_len
        return min(DEFAULT_MAX_TOKENS, room) if room > 0 else None

    def _echoes(self, fields: CompletionFields, requests: list[Request]) -> list[str]:
        """Return the prompts as text: as they came, or decoded."""
        return [
            prompt
            if isinstance(prompt, str)
            else self._client.tokenizer.decode(
                request.prompt_token_ids, skip_special_tokens=request.sampling.skip_special_tokens
            )
            for prompt, request in zip(_prompts(fields.prompt), requests, strict=True)
        ]


class CompletionChoices:
    """Choices with a text, or with what is new in it.

    Args:
        tokenizer: of the model.
        echoes: the text of each prompt, to begin its choices with; empty for no echo.
        with_logprobs: put the columns of logprobs into each choice; with echo, of the prompt too.
    """

    id_prefix = "cmpl"
    kind = "text_completion"
    part_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: list[str], *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._with_logprobs = with_logprobs
        self._columns: dict[tuple[int, int], CompletionLogprobs] = {}  # of the choices begun

    def whole(
        self, key: tuple[int, int], request: Request, generation: Generation
    ) -> dict[str, Any]:
        """Return the choice of a finished generation."""
        echoed = generation.prompt_logprobs, generation.prompt_top_logprobs
        new = generation.token_ids, generation.logprobs, generation.top_logprobs
        return self._choice(key, request, generation.text, echoed, new)

    def part(self, key: tuple[int, int], request: Request, event: StreamEvent) -> dict[str, Any]:
        """Return what is new."""
        adds_nothing = not event.text and not self._with_logprobs
        if key in self._columns and adds_nothing and event.finish_reason is None:
            return {}
        echoed = prompt_columns(request, event.prompt_scores)[:2]
        top = top_pairs(event.scores) if event.scores else ()
        return self._choice(
            key, request, event.text, echoed, (event.token_ids, event.logprobs, top)
        )

    def _choice(
        self,
        key: tuple[int, int],
        request: Request,
        text: str,
        echoed: tuple[tuple[float | None, ...], Top],
        new: tuple[tuple[int, ...], tuple[float, ...], Top],
    ) -> dict[str, Any]:
        """Return a choice with new text and logprobs, and the prompt's if it is its first."""
        is_first = key not in self._columns
        columns = self._columns.setdefault(key, CompletionLogprobs(self._tokenizer))
        echo = self._echoes[key[0]] if self._echoes and is_first else ""
        choice: dict[str, Any] = {"text": echo + text, "logprobs": None}
        if self._with_logprobs:
            rows: dict[str, list[Any]] = {}
            if self._echoes and is_first:
                logprobs, top = echoed
                token_ids = request.prompt_token_ids[: len(logprobs)]
                rows = columns.part(token_ids, logprobs, ((), *top) if top else ())
            for name, column in columns.part(*new).items():
                rows[name] = rows.get(name, []) + column
            choice["logprobs"] = rows
        return choice


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """Return the prompts: a list of numbers is one of them, any other list is many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt", "is an empty list; give at least one prompt")
    prompts: list[Prompt] = list(prompt) if isinstance(prompt[0], (str, list)) else [prompt]
    for one in prompts:
        check_ids("prompt", one)
    return prompts
