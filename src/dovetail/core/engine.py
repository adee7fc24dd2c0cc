"""The in-process engine: a port and its client, behind a small public surface.

Owns the waiting of callers. Must not decide anything that a part decides.
"""

import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dovetail.config.resolve import options_from, resolve
from dovetail.core.client import EngineClient
from dovetail.core.cursor import joined
from dovetail.core.generation import Generation, StreamEvent, collect
from dovetail.core.local import LocalEngine
from dovetail.core.mailbox import News
from dovetail.core.port import Progress
from dovetail.core.prompts import Capture, Prompt
from dovetail.errors import EngineError
from dovetail.exec.device import Device
from dovetail.exec.gpu import find_gpu
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.refit import NamedTensors
from dovetail.wire.request import LogprobParams, Request, SamplingParams
from dovetail.wire.result import TokenEvent
from dovetail.wire.status import EngineStats, Health


class Engine:
    """An LLM engine in this process.

        with Engine() as engine:
            print(engine.generate("KING HENRY")[0].text)

    Args:
        model: a Hugging Face model folder or a name on the hub; None is the embedded tiny MoE.
        on_progress: told how the start gets on; see ``core.port.Progress``.
        on_device: for tests; None makes the one that the options name.
        options: see ``EngineOptions``.

    Thread-safe. Use as a context manager or call ``close``. Of the process that made it: in a fork
    of that it is closed.

    Attributes:
        config: as decided.
        tokenizer: of the model.
        requests: makes requests, for ``generate_requests``.
        port: the engine under this surface.

    Raises:
        ConfigError: the options or the model folder cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        on_progress: Progress | None = None,
        on_device: Device | None = None,
        **options: object,
    ) -> None:
        if model is not None:
            options["model"] = str(model)
        config = resolve(options_from(options), find_gpu())
        self.tokenizer = Tokenizer.from_folder(config.tokenizer_folder)
        self.port = LocalEngine(config, self.tokenizer, on_progress=on_progress, device=on_device)
        self.config = self.port.config
        self._client = EngineClient(self.port, self.tokenizer)
        self.requests = self._client.requests

    # -- whole answers -------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
        on_finish: Callable[[int, list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Generate for one prompt or many and wait for all.

        Args:
            prompts: text, token ids or chat messages; or a list of such prompts.
            sampling_params: for all prompts, or one a prompt.
            logprobs: what to report beside the chosen tokens' logprobs.
            capture: per-token columns to return, of those that the engine captures: ``experts``,
                ``expert_weights``, and always ``tokens``, the input token at each forwarded
                position as the device stored it. For more than names see ``CaptureParams``.
            group: a label for ``abort_group``.
            priority: under the ``priority`` policy, higher goes first.
            on_finish: called with (prompt index, its generations) as each prompt ends.

        Returns:
            ``n`` generations a prompt: prompt by prompt, sample by sample.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been started.
            EngineClosed: the engine has been closed or has failed.
        """
        requests = self.requests.make_all(
            prompts,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        return self.generate_requests(requests, on_finish=on_finish)

    def generate_requests(
        self,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[int, list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Generate for requests that ``requests`` made; see ``generate``."""
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        indices = {request.request_id: index for index, request in enumerate(requests)}
        decoders = [self._client.decoder(request) for request in requests]
        parts: list[list[StreamEvent]] = [[] for _ in requests]
        done: dict[int, list[Generation]] = {}
        waiting: list[TokenEvent] = []

        def deliver(some: News) -> None:
            """Wake this thread at ends alone: it would take turns with the loop."""
            if isinstance(some, EngineError):
                news.put(some)
                return
            waiting.extend(some)
            if any(event.finish is not None for event in some):
                news.put(tuple(waiting))
                waiting.clear()

        try:
            for request in requests:
                self.port.start(msgspec.structs.replace(request, is_streamed=False), deliver)
            while len(done) < len(requests):
                for event in joined(self._next(news)):
                    index = indices[event.request_id]
                    parts[index].append(decoders[index].decode(event))
                    if decoders[index].is_done:
                        done[index] = collect(requests[index], parts[index])
                        if on_finish is not None:
                            on_finish(index, done[index])
        finally:
            self._abandon([r for index, r in enumerate(requests) if index not in done])
        return [generation for index in range(len(requests)) for generation in done[index]]

    async def agenerate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
    ) -> list[Generation]:
        """Generate for one prompt without blocking the event loop; see ``generate``."""
        request = self.requests.make(
            prompt,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        return collect(request, [event async for event in self._client.events(request)])

    # -- streams -------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
    ) -> Iterator[StreamEvent]:
        """Generate for one prompt and yield news as it comes; see ``generate``.

        The request starts now and is aborted if the iterator is dropped. With ``n`` > 1 the
        generations' events are interleaved; ``sample_index`` tells them apart.
        """
        request = self.requests.make(
            prompt,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.port.start(request, news.put)
        events = self._read_stream(request, news)
        next(events)  # enter its try block: one that never ran does not notice that it is dropped
        return events

    def _read_stream(
        self, request: Request, news: "queue.SimpleQueue[News]"
    ) -> Iterator[StreamEvent]:
        decoder = self._client.decoder(request)
        no_news = TokenEvent(request_id=request.request_id, token_ids=(), logprobs=(), epochs=())
        try:
            yield decoder.decode(no_news)  # to ``stream``
            while not decoder.is_done:
                for event in self._next(news):
                    yield decoder.decode(event)
        finally:
            if not decoder.is_done:
                self._abandon([request])

    def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Capture = (),
        group: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamEvent]:
        """Like ``stream``, for ``async for``; cancelling the task aborts the request."""
        return self._client.events(
            self.requests.make(
                prompt,
                sampling_params,
                logprobs=logprobs,
                capture=capture,
                group=group,
                priority=priority,
            )
        )

    # -- control -------------------------------------------------------------------------

    def refit(self, named_tensors: NamedTensors, *, version: int | None = None) -> int:
        """Serve new weights from now on; returns when they do.

            engine.refit(trainer_model.named_parameters())

        The tensors are checked and copied beside the old weights while the engine serves on, then
        written over them between two steps. Generations that run keep their tokens and go on under
        the new weights from a cache that is computed anew; ``Generation.weight_versions`` says
        which token is of which. Nothing of ``named_tensors`` is kept.

        Args:
            named_tensors: every weight of the model under its Hugging Face name, experts one by
                one or fused; pairs or a mapping. Any float dtype and device, converted.
            version: of the new weights, larger than the one before; None is one more.

        Returns:
            The version, which every token sampled from now on carries.

        Raises:
            RequestError: a tensor, which is named, or the version will not do. The old weights are
                served on, and nobody has noticed.
            EngineClosed: the engine has been closed or has failed.
        """
        return self.port.refit(named_tensors, version=version)

    def abort(self, request_id: int) -> None:
        """End a request early; it gets its last event with reason ``abort``.

        An id that is unknown or has ended is no error.
        """
        self._client.abort(request_id)

    def abort_group(self, group: str) -> None:
        """End all open requests that carry this label."""
        self._client.abort_group(group)

    def stats(self) -> EngineStats:
        """Return counts of this moment; exact when the engine is idle."""
        return self.port.stats()

    def health(self) -> Health:
        """Say whether the loop turns."""
        return self.port.health()

    def close(self) -> None:
        """Abort what is open, end the loop and its thread. May be called twice."""
        self.port.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.abort(request.request_id)

    def _next(self, news: "queue.SimpleQueue[News]") -> Sequence[TokenEvent]:
        """Wait for events, or raise why there are none."""
        self.port.home.check()
        some = news.get()
        if isinstance(some, EngineError):
            raise some
        return some
