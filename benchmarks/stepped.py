"""An engine whose loop a benchmark turns by hand, on its own thread."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Inbox, Outbox
from dovetail.dist.comm import LocalComm
from dovetail.exec.backend import Backend
from dovetail.exec.executor import Executor
from dovetail.exec.registry import load_backend
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model
from dovetail.sched.scheduler import Scheduler
from dovetail.weights.dummy import fill_with_noise
from dovetail.wire.control import Admit
from dovetail.wire.request import CaptureParams, LogprobParams, Request, SamplingParams


def empty_model(config: EngineConfig, backend: Backend) -> DecoderLM:
    """Return the configured model in the backend's memory, before it has weights."""
    return build_model(
        config.model,
        dtype=getattr(torch, config.dtype),
        device=backend.device.torch_device,
        comm=LocalComm(),
        kernels=backend.kernels,
        allocate=partial(backend.device.memory.zeros, "weights"),
    )


class SteppedEngine:
    """A scheduler and an executor with random weights; options are those of ``EngineOptions``."""

    def __init__(self, **options: object) -> None:
        config = resolve(options_from({"load_format": "dummy", **options}))
        backend = load_backend(config)
        model = empty_model(config, backend)
        fill_with_noise(model)
        self.config = config = backend.size_pool(model, _ignore)
        runner = backend.make_runner(config, model, _ignore)
        self.executor = Executor(config, runner, backend.device)
        ledger = KVLedger(
            (PagedGroup(name="paged", page_size=config.page_size),), (config.num_pages,)
        )
        self.scheduler = Scheduler(config, ledger, token_bytes=lambda _: b"")
        self.loop = EngineLoop(
            self.scheduler, self.executor, inbox=Inbox(), outbox=Outbox(), depth=config.depth
        )
        self._num_requests = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.6,
        logprobs: LogprobParams | None = None,
        **sampling_fields: Any,
    ) -> None:
        """Queue a request; with captured columns it returns their rows."""
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            temperature=temperature,
            **sampling_fields,
        )
        request = Request(
            request_id=self._num_requests,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            seed=self._num_requests,
            logprobs=logprobs or LogprobParams(),
            capture=CaptureParams(columns=self.config.capture),
        )
        self._num_requests += 1
        self.loop.outbox.open(request.request_id, lambda news: None)
        self.loop.inbox.put(Admit(request))

    def fill(self, num_rows: int, prompt_len: int, *, max_new_tokens: int, **fields: Any) -> None:
        """Queue requests with these fields of ``add`` and step until all of them decode."""
        for i in range(num_rows):
            prompt = [(7 * i + j) % 1000 + 3 for j in range(prompt_len)]
            self.add(prompt, max_new_tokens=max_new_tokens, **fields)
        while self.scheduler.num_waiting or self.scheduler.num_running < num_rows:
            self.loop.step()
        for _ in range(prompt_len // self.config.chunk_size + 4):
            self.loop.step()

    def finish(self) -> None:
        """Step until nothing is open."""
        while self.scheduler.num_open or self.loop.inflight:
            self.loop.step()


def _ignore(what: str, num_done: int, num_total: int) -> None:
    """Nobody asked how the start gets on."""
