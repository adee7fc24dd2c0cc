"""The engine that runs its loop on a thread of this process.

Owns the loop's thread and the life of the parts. Must not decide anything that a part decides, and
knows nothing of text but the bytes of tokens.
"""

import threading
import time
import weakref
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.core.control import MAX_VERSION, Refit
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Deliver, Inbox, Outbox
from dovetail.core.port import HEALTH_TIMEOUT_SECONDS, Home, Progress, health_of
from dovetail.dist.comm import LocalComm
from dovetail.errors import EngineClosed, EngineError, InvariantError, RequestError
from dovetail.exec.device import Device
from dovetail.exec.executor import Executor
from dovetail.exec.registry import load_backend
from dovetail.exec.selftest import check_capture_works
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model, check_capture
from dovetail.sched.scheduler import Scheduler
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.dummy import fill_with_noise
from dovetail.weights.load import check_weights, load_weights
from dovetail.weights.refit import NamedTensors, StagedWeights
from dovetail.wire.control import Abort, AbortGroup, Admit, Close
from dovetail.wire.request import Request
from dovetail.wire.status import EngineStats, Health

LOADING = "loading weights"
REFIT_POLL_SECONDS = 0.5


class LocalEngine:
    """An ``EnginePort`` with the loop on a thread of its own in this process.

    Args:
        config: what was decided; ``self.config`` has the pool as it was measured.
        tokenizer: of the same model.
        on_progress: told how the start gets on; see ``core.port.Progress``.
        device: for tests; None makes the one that the configuration names.
        max_open: most generations that may run or wait; None is no limit.
        health_timeout_s: a loop that has not turned for longer is ``stalled``.

    Raises:
        ConfigError: the weights cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        on_progress: Progress | None = None,
        device: Device | None = None,
        max_open: int | None = None,
        health_timeout_s: float = HEALTH_TIMEOUT_SECONDS,
    ) -> None:
        # What runs may have a larger pool than was asked for, so it comes first.
        executor, self._model, config = _build_executor(config, device, on_progress)
        self.config = config
        self.ledger = KVLedger(
            (PagedGroup(name="paged", page_size=config.page_size),), (config.num_pages,)
        )
        self.scheduler = Scheduler(
            config,
            self.ledger,
            token_bytes=tokenizer.token_bytes,
            special_ids=tokenizer.special_ids,
        )
        self._inbox, self._outbox = Inbox(), Outbox(max_open=max_open)
        self.loop = EngineLoop(
            self.scheduler,
            executor,
            inbox=self._inbox,
            outbox=self._outbox,
            depth=config.depth,
        )
        self._health_timeout_s = health_timeout_s
        self.home = Home()
        self._thread = threading.Thread(
            target=self._run, args=(executor,), name="dovetail-loop", daemon=True
        )
        self._thread.start()
        # Also when Python exits: a thread that is ended within torch takes the process down.
        weakref.finalize(self, _end_loop, self._inbox, self._thread)

    def start(self, request: Request, deliver: Deliver) -> None:
        """Begin a request; see ``EnginePort``."""
        self._check_runs()
        self._outbox.open(request.request_id, deliver, num_samples=request.sampling.n)
        self._inbox.put(Admit(request))

    def send(self, message: Abort | AbortGroup) -> None:
        """Pass a message to the loop."""
        self._inbox.put(message)

    def refit(self, named_tensors: NamedTensors, *, version: int | None = None) -> int:
        """Serve new weights; see ``Engine.refit``. Not from the loop's own thread."""
        if threading.current_thread() is self._thread:
            raise InvariantError("the loop's thread would wait for itself")
        self._check_runs()
        _check_version(version)
        staged = StagedWeights(self._model, named_tensors, comm=LocalComm())
        message = Refit(staged.install, version)
        self._inbox.put(message)
        while not message.done.done():
            self._check_runs()  # else nobody will answer
            wait([message.done], timeout=REFIT_POLL_SECONDS)
        return message.done.result()

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

    @property
    def turn_age_s(self) -> float:
        """Seconds since the loop last began a turn."""
        return time.monotonic() - self.loop.turned_at

    def health(self) -> Health:
        """Say whether the loop turns."""
        return health_of(self.failure, turn_age_s=self.turn_age_s, timeout_s=self._health_timeout_s)

    @property
    def failure(self) -> EngineError | None:
        """Why there is no loop; None while it runs."""
        return self.home.failure or self._outbox.failure

    def stop(self) -> None:
        """Abort what is open and let the loop end; does not wait for it."""
        self._inbox.put(Close())

    def wait(self, timeout_s: float) -> bool:
        """Wait for the loop's end, so long; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Abort what is open, end the loop and its thread; waits for the step in flight."""
        _end_loop(self._inbox, self._thread)

    def _check_runs(self) -> None:
        failure = self.failure
        if failure is not None:
            raise EngineClosed(str(failure))

    def _run(self, executor: Executor) -> None:
        num_threads = self.config.num_threads
        torch.set_num_threads(num_threads)
        with threadpool_limits(limits=num_threads, user_api="blas"):  # numpy's
            self.loop.run(executor.adopt_thread())


def _check_version(version: object) -> None:
    if version is None:
        return
    if not isinstance(version, int) or isinstance(version, bool):
        raise RequestError("version", f"is {version!r}; give a whole number, or none")
    if not 0 <= version <= MAX_VERSION:
        raise RequestError("version", f"is {version}; give at most {MAX_VERSION}")


def _end_loop(inbox: Inbox, thread: threading.Thread) -> None:
    inbox.put(Close())
    if thread is not threading.current_thread():
        thread.join()


def _build_executor(
    config: EngineConfig, device: Device | None, on_progress: Progress | None
) -> tuple[Executor, DecoderLM, EngineConfig]:
    """Return the executor, the model that it runs, and the configuration with its real pool."""
    check_capture(config.model, config.capture)
    on_progress = on_progress or _ignore
    backend, comm, folder = load_backend(config, device), LocalComm(), Path(config.model_folder)
    build = partial(
        build_model,
        config.model,
        dtype=getattr(torch, config.dtype),
        comm=comm,
        kernels=backend.kernels,
    )
    is_dummy = config.load_format == "dummy"
    if not is_dummy:
        # Without memory first: sizes that are not the checkpoint's may be more than there is.
        check_weights(build(device="meta"), folder)
    model = build(
        device=backend.device.torch_device,
        allocate=partial(backend.device.memory.zeros, "weights"),
    )
    if is_dummy:
        fill_with_noise(model)
    else:
        with backend.weight_copies() as copy:
            load_weights(
                model, folder, comm=comm, on_progress=partial(on_progress, LOADING), copy=copy
            )
    config = backend.size_pool(model, on_progress)
    executor = Executor(config, backend.make_runner(config, model, on_progress), backend.device)
    if config.capture:
        try:
            check_capture_works(executor, config)
        except BaseException:
            executor.close()
            raise
    return executor, model, config


def _ignore(what: str, num_done: int, num_total: int) -> None:
    """Nobody asked how the start gets on."""
