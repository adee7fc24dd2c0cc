"""Numbers for Prometheus: counts of what was served, and the engine's gauges at each look.

Owns the names. A registry of its own, so that two servers in one process do not meet.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.wire.status import EngineStats

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What a server counts. Used on its event loop alone."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter(
            "dovetail_http_requests",
            "HTTP requests answered.",
            ["route", "status"],
            registry=self._registry,
        )
        self._finished = Counter(
            "dovetail_generations",
            "Generations that ended; abandoned ones lost their client or were refused.",
            ["reason"],
            registry=self._registry,
        )
        self._prompt = Counter(
            "dovetail_prompt_tokens",
            "Prompt tokens of requests that ended; a prompt counts once, whatever its n.",
            registry=self._registry,
        )
        self._generated = Counter(
            "dovetail_generated_tokens", "Tokens generated.", registry=self._registry
        )
        self._first_token = Histogram(
            "dovetail_time_to_first_token_seconds",
            "From a request's start to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._latency = Histogram(
            "dovetail_generation_seconds",
            "From a request's start to the end of one of its generations.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_EngineGauges(stats))

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP reply; status 499 is a client that left before it."""
        self._http.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Note how long a request waited for its first token."""
        self._first_token.observe(seconds)

    def generated(self, num_tokens: int) -> None:
        """Count tokens as they come."""
        self._generated.inc(num_tokens)

    def finished(self, reason: str, seconds: float) -> None:
        """Count one generation that has ended."""
        self._finished.labels(reason).inc()
        self._latency.observe(seconds)

    def ended(self, num_prompt_tokens: int, *, num_abandoned: int) -> None:
        """Count a request; of its generations, those whose client left before their end."""
        self._prompt.inc(num_prompt_tokens)
        if num_abandoned:
            self._finished.labels("abandoned").inc(num_abandoned)

    def page(self) -> bytes:
        """Return all numbers in Prometheus' text form."""
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """The engine's own counts, asked for at each look."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, value, about in (
            ("running_sequences", stats.num_running, "Sequences that run."),
            ("waiting_sequences", stats.num_waiting, "Sequences that wait to start."),
            ("kv_pages", stats.num_pages, "Pages of the KV pool."),
            ("kv_free_pages", stats.num_free_pages, "Pages that nothing uses."),
            ("kv_cached_pages", stats.num_cached_pages, "Cached pages that can be evicted."),
        ):
            yield GaugeMetricFamily(f"dovetail_{name}", about, value=value)
        yield CounterMetricFamily(
            "dovetail_cached_tokens",
            "Prompt tokens served from the prefix cache.",
            value=stats.num_cached_tokens,
        )
