"""Metrics for Prometheus.

The counters and gauges of `EngineStats` are read at each scrape. HTTP responses and answers are counted when they end.

What belongs to an engine exists twice: `mercury_waiting` is of all models together, so that dashboards and autoscalers
need not know how many there are, and `mercury_model_waiting{model="nano"}` is of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping

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
    "dispatches": "Calls of the device program, of one or several passes each.",
}


class Metrics:
    """The metrics of one app, in their own registry, so that a process may hold several apps.

    Args:
        paths: Paths with their own label. All other paths share the label "other", so that clients cannot create an
            unbounded number of time series.

    Attributes:
        registry: The registry of all metrics.
        schema_failures: Counts answers that did not match their schema.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, EngineStats]],
        ready: Callable[[], bool],
        paths: Collection[str],
    ):
        self.registry = CollectorRegistry()
        self._stats, self._ready, self._paths = stats, ready, frozenset(paths)
        self.registry.register(self)  # type: ignore[arg-type]
        counter = functools.partial(Counter, registry=self.registry)
        about = "Responses by route and status."
        self._responses = counter("mercury_http_responses", about, labelnames=["path", "status"])
        about = "From the request's arrival to its first snapshot."
        self._first_frame = self._histograms("first_frame_seconds", about, SECONDS_BUCKETS)
        about = "From the request's arrival to its last token."
        self._last_token = self._histograms("last_token_seconds", about, SECONDS_BUCKETS)
        about = "Tokens of an answer per denoising pass."
        self._tokens_per_forward = self._histograms("tokens_per_forward", about, TOKENS_PER_FORWARD_BUCKETS)
        about = "Answers that did not obey the schema they were promised to. Must stay 0."
        self.schema_failures = counter("mercury_structured_output_failures", about)

    def collect(self) -> Iterator[Metric]:
        """Yields two metric families for each field of `EngineStats`; `prometheus_client` calls it at each scrape."""
        stats = self._stats()
        fields = [(GaugeMetricFamily, *one) for one in ENGINE_GAUGES.items()]
        fields += [(CounterMetricFamily, *one) for one in ENGINE_COUNTERS.items()]
        for family, name, about in fields:
            values = {model: getattr(of_model, name) for model, of_model in stats.items()}
            # Positions per slot do not add up.
            together = max if name == "capacity" else sum
            yield family(f"mercury_{name}", about, value=together(values.values()))
            each = family(f"mercury_model_{name}", f"Of one model. {about}", labels=["model"])
            for model, value in values.items():
                each.add_metric([model], value)
            yield each
        about = "Whether requests are accepted."
        yield GaugeMetricFamily("mercury_ready", about, value=float(self._ready()))

    def count_response(self, scope: Scope, status: int) -> None:
        """Counts one HTTP response."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._responses.labels(path, str(status)).inc()

    def count_answer(self, model: str, first: float, last: float, tokens: int, forwards: int) -> None:
        """Counts one answer."""
        observed = [(self._first_frame, first), (self._last_token, last)]
        if forwards:
            observed.append((self._tokens_per_forward, tokens / forwards))
        for (together, each), value in observed:
            together.observe(value)
            each.labels(model).observe(value)

    def _histograms(self, name: str, about: str, buckets: tuple[float, ...]) -> tuple[Histogram, Histogram]:
        """Makes the histogram of all models together, and the one with a label for the model."""
        make = functools.partial(Histogram, registry=self.registry, buckets=buckets)
        each = make(f"mercury_model_{name}", f"Of one model. {about}", labelnames=["model"])
        return make(f"mercury_{name}", about), each
