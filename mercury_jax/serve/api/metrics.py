"""What is measured, for Prometheus: the engine's own counts when asked, the requests as they end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mercury_jax.serve.engine.request import EngineStats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
TOKENS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)

GAUGES = {
    "waiting": "Requests that have no slot yet.",
    "running": "Slots in use.",
    "slots": "Slots in all.",
    "capacity": "Positions of a slot right now.",
    "kv_bytes": "Bytes of the slots' keys and values.",
    "kv_used": "Of these, bytes that belong to running requests.",
    "prefix_bytes": "Bytes of the keys kept of earlier prompts.",
}
COUNTS = {
    "submitted": "Jobs taken into the queue.",
    "finished": "Jobs that came to their end.",
    "cancelled": "Jobs that were cancelled: the client left, or a stop text was met.",
    "rejected": "Jobs for which the queue had no room.",
    "failed": "Jobs that ended with an error.",
    "forwards": "Denoising passes, summed over the requests.",
    "tokens": "Tokens of finished answers.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Of these, tokens whose keys were there already.",
    "device_passes": "Passes of the device program.",
}


class Timing(NamedTuple):
    """One answer as it is counted: seconds from the request's arrival, tokens and forwards."""

    first: float
    last: float
    tokens: int
    forwards: int


class Engine:
    """Reads an engine's `Stats` whenever the metrics are read."""

    def __init__(self, engine: Any):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats: EngineStats = self._engine.stats()
        for name, about in GAUGES.items():
            yield GaugeMetricFamily(f"mercury_{name}", about, value=getattr(stats, name))
        for name, about in COUNTS.items():
            yield CounterMetricFamily(f"mercury_{name}", about, value=getattr(stats, name))
        yield GaugeMetricFamily("mercury_ready", "Whether jobs are taken.", value=float(ready(self._engine)))


def ready(engine: Any) -> bool:
    """Warm, and not about to end."""
    return bool(engine.ready) and not engine.closing


class Metrics:
    """A registry of one app: nothing is global, so a process may hold several."""

    def __init__(self, engine: Any, paths: Collection[str]):
        self.registry = CollectorRegistry()
        self.registry.register(Engine(engine))  # type: ignore[arg-type]
        self._paths = frozenset(paths)
        made: dict[str, Any] = dict(registry=self.registry)
        self._answers = Counter(
            "mercury_http_responses", "Answers by route and status.", ["path", "status"], **made
        )
        self._first = _histogram(
            "first_frame", "From the request's arrival to its first frame.", SECONDS, **made
        )
        self._last = _histogram(
            "last_token", "From the request's arrival to its last token.", SECONDS, **made
        )
        self._speed = Histogram(
            "mercury_tokens_per_forward", "Tokens of an answer over its forwards.", buckets=TOKENS, **made
        )
        self.broken = Counter(
            "mercury_structured_output_failures",
            "Answers that did not obey the schema they were promised to. Must stay 0.",
            **made,
        )

    def answered(self, scope: Any, status: int) -> None:
        """One HTTP answer; unknown paths are counted together, so that no client makes up labels."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._answers.labels(path, str(status)).inc()

    def timed(self, timing: Timing) -> None:
        self._first.observe(timing.first)
        self._last.observe(timing.last)
        if timing.forwards:
            self._speed.observe(timing.tokens / timing.forwards)

    def text(self) -> bytes:
        """The exposition format, for a scrape."""
        return generate_latest(self.registry)


def _histogram(name: str, about: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"mercury_{name}_seconds", about, buckets=buckets, registry=registry)
