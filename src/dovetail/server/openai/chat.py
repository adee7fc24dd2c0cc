"""``/v1/chat/completions``."""

from typing import Any

from starlette.requests import Request as HttpRequest

from dovetail.core.client import EngineClient
from dovetail.core.generation import Generation, StreamEvent, top_pairs
from dovetail.errors import RequestError
from dovetail.server.body import off_loop, read_body
from dovetail.server.native_body import namespace_of
from dovetail.server.openai.answers import Answers
from dovetail.server.openai.body import (
    OF_CHATS,
    CallFields,
    ChatFields,
    SamplingFields,
    read_chat,
    renamed,
)
from dovetail.server.openai.logprobs import chat_logprobs
from dovetail.server.openai.models import check_model
from dovetail.server.reply_limit import check_listed
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import EventStream, WholeReply
from dovetail.server.traffic import Traffic
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import Request


class ChatRoute:
    """The route over one engine."""

    def __init__(self, client: EngineClient, traffic: Traffic, settings: ServerSettings) -> None:
        self._client = client
        self._traffic = traffic
        self._settings = settings

    async def complete(self, http: HttpRequest) -> WholeReply | EventStream:
        """Answer a chat."""
        body = await read_body(http, self._settings)
        call, sampling, chat = await off_loop(body.num_bytes, lambda: read_chat(body.fields))
        check_model(call.model, self._settings.model_name)
        try:
            request = await off_loop(body.num_bytes, lambda: self._request(call, sampling, chat))
        except RequestError as error:
            raise renamed(error, OF_CHATS, sampling) from None
        choices = ChatChoices(self._client.tokenizer, with_logprobs=chat.logprobs)
        num_layers = self._client.config.model.num_layers
        answers = Answers(
            call, self._settings.model_name, [request], choices, num_layers=num_layers
        )
        if call.stream:
            return EventStream(answers.stream(self._traffic))
        return WholeReply(answers.whole(self._traffic), "application/json")

    def _request(self, call: CallFields, sampling: SamplingFields, chat: ChatFields) -> Request:
        requests = self._client.requests
        token_ids = requests.encode_chat(chat.messages, chat.chat_template_kwargs)
        room = self._client.config.context_len - len(token_ids)
        request = requests.make(
            token_ids,
            sampling.params(room if room > 0 else None),
            logprobs=chat.asked(),
            capture=call.capture,
            priority=call.priority,
            label=call.rid,
            namespace=namespace_of(call.extra_key, call.cache_salt),
        )
        check_listed([request])
        return request


class ChatChoices:
    """Choices with a message, or with what is new in it."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    part_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._begun: set[tuple[int, int]] = set()

    def whole(
        self, key: tuple[int, int], request: Request, generation: Generation
    ) -> dict[str, Any]:
        """Return the choice of a finished generation."""
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": generation.text},
            "logprobs": None,
        }
        if self._with_logprobs:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer,
                generation.token_ids,
                generation.logprobs,
                generation.top_logprobs,
            )
        return choice

    def part(self, key: tuple[int, int], request: Request, event: StreamEvent) -> dict[str, Any]:
        """Return what is new; the first part of a choice names the role."""
        if key in self._begun and not event.text and not self._with_logprobs:
            if event.finish_reason is None:
                return {}
            return {"delta": {}, "logprobs": None}
        delta: dict[str, Any] = {"content": event.text}
        if key not in self._begun:
            self._begun.add(key)
            delta = {"role": "assistant", **delta}
        choice: dict[str, Any] = {"delta": delta, "logprobs": None}
        if self._with_logprobs:
            top = top_pairs(event.scores) if event.scores else ()
            choice["logprobs"] = chat_logprobs(
                self._tokenizer, event.token_ids, event.logprobs, top
            )
        return choice
