"""Metrics for Prometheus.

The counters and gauges of `EngineStats` are read at each scrape. HTTP responses and answers are counted when they end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import Scope

from mercury_jax.serve.engine.request import EngineStats

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
TOKENS_PER_FORWARD_BUCKETS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Fields of `EngineStats` with their help texts.
ENGINE_GAUGES = {
    "waiting": "Requests that have no slot yet.",
    "running": "Slots in use.",
    "slots": "Slots in total.",
    "capacity": "Current positions per slot.",
    "kv_bytes": "Bytes of the slots' KV cache.",
    "kv_used": "Bytes of the KV cache that belong to running requests.",
    "prefix_bytes": "Bytes of the prefix cache.",
}
ENGINE_COUNTERS = {
    "submitted": "Requests accepted into the queue.",
    "finished": "Requests that finished.",
    "cancelled": "Requests that were cancelled: the client disconnected, or a stop sequence was found.",
    "rejected": "Requests for which the queue had no room.",
    "failed": "Requests that ended with an error.",
    "forwards": "Denoising passes, summed over the requests.",
    "tokens": "Tokens of finished answers.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were found in the prefix cache.",
    "device_passes": "Passes of the device program.",
}


class Metrics:
    """The metrics of one app, in their own registry, so that a process may hold several apps.

    Args:
        stats: Returns the statistics of the engine.
        ready: Returns whether the engine accepts requests.
        paths: Paths with their own label. All other paths share the label "other", so that clients cannot create an
            unbounded number of time series.

    Attributes:
        registry: The registry of all metrics.
        schema_failures: Counts answers that did not match their schema.
    """

    def __init__(self, stats: Callable[[], EngineStats], ready: Callable[[], bool], paths: Collection[str]):
        self.registry = CollectorRegistry()
        self._stats, self._ready, self._paths = stats, ready, frozenset(paths)
        self.registry.register(self)  # type: ignore[arg-type]
        histogram = functools.partial(Histogram, registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        about = "Responses by route and status."
        self._responses = counter("mercury_http_responses", about, labelnames=["path", "status"])
        about = "From the request's arrival to its first snapshot."
        self._first_frame = histogram("mercury_first_frame_seconds", about, buckets=SECONDS_BUCKETS)
        about = "From the request's arrival to its last token."
        self._last_token = histogram("mercury_last_token_seconds", about, buckets=SECONDS_BUCKETS)
        about = "Tokens of an answer per denoising pass."
        self._tokens_per_forward = histogram(
            "mercury_tokens_per_forward", about, buckets=TOKENS_PER_FORWARD_BUCKETS
        )
        about = "Answers that did not obey the schema they were promised to. Must stay 0."
        self.schema_failures = counter("mercury_structured_output_failures", about)

    def collect(self) -> Iterator[Metric]:
        """Yields a metric family for each field of `EngineStats`; `prometheus_client` calls it at each scrape."""
        stats = self._stats()
        for name, about in ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"mercury_{name}", about, value=getattr(stats, name))
        for name, about in ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"mercury_{name}", about, value=getattr(stats, name))
        about = "Whether requests are accepted."
        yield GaugeMetricFamily("mercury_ready", about, value=float(self._ready()))

    def count_response(self, scope: Scope, status: int) -> None:
        """Counts one HTTP response.

        Args:
            scope: ASGI scope of the request.
            status: HTTP status; 499 if the client disconnected.
        """
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._responses.labels(path, str(status)).inc()

    def count_answer(self, first: float, last: float, tokens: int, forwards: int) -> None:
        """Counts one answer.

        Args:
            first: Seconds from the request's arrival to its first snapshot.
            last: Seconds from the request's arrival to its last token.
            tokens: Tokens of the answer, thinking included.
            forwards: Denoising passes; 0 for an answer that needed no decoding, which has no tokens per pass.
        """
        self._first_frame.observe(first)
        self._last_token.observe(last)
        if forwards:
            self._tokens_per_forward.observe(tokens / forwards)
