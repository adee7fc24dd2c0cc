"""The in-process engine: everything wired together, behind a small public surface.

Owns the loop's thread and the life of the parts. Must not decide anything that a
part decides.
"""

import asyncio
import operator
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.core.generation import Generation, RequestDecoder, StreamEvent, collect
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Deliver, Inbox, Outbox
from dovetail.core.prompts import Prompt, RequestMaker
from dovetail.dist.comm import LocalComm
from dovetail.errors import EngineError, RequestError
from dovetail.exec.device import CpuDevice, Device, ThreadedCpuDevice
from dovetail.exec.executor import Executor
from dovetail.models.registry import build_model
from dovetail.sched.scheduler import Scheduler
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.load import load_weights
from dovetail.wire.control import Abort, AbortGroup, Admit, Close
from dovetail.wire.request import GenerateBody, LogprobParams, Request, SamplingParams
from dovetail.wire.result import TokenEvent
from dovetail.wire.validate import Limits

CAPTURE_COLUMNS = frozenset({"tokens"})
Progress = Callable[[int, int], None]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of this moment.

    Attributes:
        num_running, num_waiting: sequences.
        num_pages, num_free_pages, num_cached_pages: of the KV pool; cached ones can be
            evicted at once.
        num_cached_tokens: prompt tokens served from the prefix cache since the start.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_cached_tokens: int


class Engine:
    """An LLM engine in this process.

        with Engine() as engine:
            print(engine.generate("KING HENRY")[0].text)

    Args:
        model: a Hugging Face model folder or a name on the hub; None is the embedded tiny MoE.
        on_progress: called with (bytes read, bytes in all) while weights load.
        device: for tests; None makes the one that the options name.
        options: see ``EngineOptions``.

    Thread-safe. Use as a context manager or call ``close``.

    Raises:
        ConfigError: the options or the model folder cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        on_progress: Progress | None = None,
        device: Device | None = None,
        **options: object,
    ) -> None:
        if model is not None:
            options["model"] = str(model)
        self.config = resolve(options_from(options))
        self.tokenizer = Tokenizer.from_folder(Path(self.config.model_folder))
        self._requests = RequestMaker(
            self.tokenizer,
            ChatTemplate.from_folder(Path(self.config.model_folder), self.tokenizer),
            Limits(vocab_size=self.config.model.vocab_size, context_len=self.config.context_len),
            capture_columns=CAPTURE_COLUMNS,
        )
        self.ledger = KVLedger(
            (PagedGroup(name="paged", page_size=self.config.page_size),), (self.config.num_pages,)
        )
        self.scheduler = Scheduler(
            self.config,
            self.ledger,
            token_bytes=self.tokenizer.token_bytes,
            special_ids=self.tokenizer.special_ids,
        )
        self._inbox, self._outbox = Inbox(), Outbox()
        executor = _build_executor(self.config, device, on_progress)
        self._loop = EngineLoop(
            self.scheduler,
            executor,
            inbox=self._inbox,
            outbox=self._outbox,
            depth=self.config.depth,
        )
        self._thread = threading.Thread(target=self._run, name="dovetail-loop", daemon=True)
        self._thread.start()
        # Also when Python exits: a thread that is ended within torch takes the process down.
        weakref.finalize(self, _end_loop, self._inbox, self._thread)

    # -- whole answers -------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Sequence[str] = (),
        group: str | None = None,
        priority: int = 0,
        on_finish: Callable[[int, list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Generate for one prompt or many and wait for all.

        Args:
            prompts: text, token ids or chat messages; or a list of such prompts.
            sampling_params: for all prompts, or one a prompt.
            logprobs: what to report beside the chosen tokens' logprobs.
            capture: per-token columns to return; ``tokens`` is the input token at each
                forwarded position as the device stored it.
            group: a label for ``abort_group``.
            priority: under the ``priority`` policy, higher goes first.
            on_finish: called with (prompt index, its generations) as each prompt ends.

        Returns:
            ``n`` generations a prompt: prompt by prompt, sample by sample.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been started.
            EngineClosed: the engine has been closed or has failed.
        """
        requests = self._requests.make_all(
            prompts,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        return self._finish_all(requests, on_finish)

    def generate_bodies(
        self,
        bodies: Sequence[GenerateBody],
        *,
        on_finish: Callable[[int, list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Generate for request bodies, each with its own parameters; see ``generate``."""
        return self._finish_all(self._requests.make_bodies(bodies), on_finish)

    def _finish_all(
        self,
        requests: list[Request],
        on_finish: Callable[[int, list[Generation]], None] | None,
    ) -> list[Generation]:
        news: queue.SimpleQueue[tuple[int, TokenEvent | EngineError]] = queue.SimpleQueue()
        decoders = [self._decoder(request) for request in requests]
        parts: list[list[StreamEvent]] = [[] for _ in requests]
        done: dict[int, list[Generation]] = {}
        try:
            for index, request in enumerate(requests):
                self._start(request, lambda event, index=index: news.put((index, event)))
            while len(done) < len(requests):
                index, event = news.get()
                parts[index].append(decoders[index].decode(_checked(event)))
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
        capture: Sequence[str] = (),
        group: str | None = None,
        priority: int = 0,
    ) -> list[Generation]:
        """Generate for one prompt without blocking the event loop; see ``generate``."""
        request = self._requests.make(
            prompt,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        return collect(request, [event async for event in self._astream(request)])

    # -- streams -------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Sequence[str] = (),
        group: str | None = None,
        priority: int = 0,
    ) -> Iterator[StreamEvent]:
        """Generate for one prompt and yield news as it comes; see ``generate``.

        The request starts now and is aborted if the iterator is dropped. With ``n`` > 1 the
        generations' events are interleaved; ``sample_index`` tells them apart.
        """
        request = self._requests.make(
            prompt,
            sampling_params,
            logprobs=logprobs,
            capture=capture,
            group=group,
            priority=priority,
        )
        news: queue.SimpleQueue[TokenEvent | EngineError] = queue.SimpleQueue()
        self._start(request, news.put)
        events = self._read_stream(request, news)
        next(events)  # enter its try block: one that never ran does not notice that it is dropped
        return events

    def _read_stream(
        self, request: Request, news: "queue.SimpleQueue[TokenEvent | EngineError]"
    ) -> Iterator[StreamEvent]:
        decoder = self._decoder(request)
        no_news = TokenEvent(request_id=request.request_id, token_ids=(), logprobs=(), epochs=())
        try:
            yield decoder.decode(no_news)  # to ``stream``
            while not decoder.is_done:
                yield decoder.decode(_checked(news.get()))
        finally:
            if not decoder.is_done:
                self._abandon([request])

    def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        logprobs: LogprobParams | None = None,
        capture: Sequence[str] = (),
        group: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamEvent]:
        """Like ``stream``, for ``async for``; cancelling the task aborts the request."""
        return self._astream(
            self._requests.make(
                prompt,
                sampling_params,
                logprobs=logprobs,
                capture=capture,
                group=group,
                priority=priority,
            )
        )

    async def _astream(self, request: Request) -> AsyncIterator[StreamEvent]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()

        def deliver(event: TokenEvent | EngineError) -> None:
            try:
                loop.call_soon_threadsafe(news.put_nowait, event)
            except RuntimeError:  # the client's event loop is closed: nobody listens any more
                self._abandon([request])

        self._start(request, deliver)
        decoder = self._decoder(request)
        try:
            while not decoder.is_done:
                yield decoder.decode(_checked(await news.get()))
        finally:
            if not decoder.is_done:
                self._abandon([request])

    # -- control -------------------------------------------------------------------------

    def abort(self, request_id: int) -> None:
        """End a request early; it gets its last event with reason ``abort``.

        An id that is unknown or has ended is no error.
        """
        self._inbox.put(Abort(operator.index(request_id)))  # a wrong type fails here, not there

    def abort_group(self, group: str) -> None:
        """End all open requests that carry this label."""
        if type(group) is not str:
            raise RequestError("group", f"is {group!r}; give a text")
        self._inbox.put(AbortGroup(group))

    def stats(self) -> EngineStats:
        """Return counts of this moment; exact when the engine is idle."""
        pages = self.ledger.stats()
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_pages=pages.total,
            num_free_pages=pages.free,
            num_cached_pages=pages.evictable,
            num_cached_tokens=pages.hit_tokens,
        )

    def close(self) -> None:
        """Abort what is open, end the loop and its thread. May be called twice."""
        _end_loop(self._inbox, self._thread)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------

    def _start(self, request: Request, deliver: Deliver) -> None:
        self._outbox.open(request.request_id, deliver, num_samples=request.sampling.n)
        self._inbox.put(Admit(request))

    def _decoder(self, request: Request) -> RequestDecoder:
        return RequestDecoder(
            request, self.tokenizer, eos_token_ids=self.config.model.eos_token_ids
        )

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.abort(request.request_id)

    def _run(self) -> None:
        torch.set_num_threads(self.config.num_threads)
        self._loop.run()


def _end_loop(inbox: Inbox, thread: threading.Thread) -> None:
    inbox.put(Close())
    if thread is not threading.current_thread():
        thread.join()


def _checked(event: TokenEvent | EngineError) -> TokenEvent:
    if isinstance(event, EngineError):
        raise event
    return event


def _build_executor(
    config: EngineConfig, device: Device | None, on_progress: Progress | None
) -> Executor:
    if device is None:
        device = ThreadedCpuDevice() if config.lanes == "threaded" else CpuDevice()
    comm = LocalComm()
    model = build_model(
        config.model,
        dtype=getattr(torch, config.dtype),
        device=device.torch_device,
        comm=comm,
    )
    load_weights(model, Path(config.model_folder), comm=comm, on_progress=on_progress)
    return Executor(config, model, device)
