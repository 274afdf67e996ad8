"""An engine that shows what a test wants to see: real tickets, snapshots by script, at the test's own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from mercury_jax.serve.engine.request import EngineConfig, EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.sampling_params import rule_set
from mercury_jax.types import LM

Script = Callable[[EngineRequest], Sequence[Snapshot]]


class Scripted:
    """`submit` publishes the script's snapshots from a thread; with `hold` set, one for each `gate.release()`."""

    def __init__(self, lm: LM, script: Script):
        self.lm, self.script, self.config = lm, script, EngineConfig()
        self.context, self.ready, self.closing = lm.model.config.context, True, False
        self.rules, self.block = rule_set(lm), lm.model.config.block
        self.tickets: list[RequestHandle] = []
        self.busy = 0
        self.hold, self.gate = False, threading.Semaphore(0)

    def start(self) -> None:
        """It is always ready."""

    def stop(self) -> None:
        self.closing = True
        self.gate.release(10_000)

    def stats(self) -> SimpleNamespace:
        """Of an engine of one slot; a test sets how many requests are there."""
        return SimpleNamespace(slots=1, running=min(self.busy, 1), waiting=max(self.busy - 1, 0))

    def submit(self, job: EngineRequest) -> RequestHandle:
        ticket = RequestHandle(job, lambda: None)
        self.tickets.append(ticket)
        threading.Thread(target=self._play, args=(ticket,), daemon=True).start()
        return ticket

    def _play(self, ticket: RequestHandle) -> None:
        for snapshot in self.script(ticket.request):
            if self.hold:
                self.gate.acquire()
            if ticket.cancelled:
                snapshot = snapshot._replace(finish="cancelled")
            ticket.publish(snapshot)


def shot(
    tokens: Sequence[int],
    settled: Sequence[int],
    confidence: Sequence[float],
    forwards: int,
    *,
    forced: Sequence[int] = (),
    start: int = 0,
    finish: str | None = None,
) -> Snapshot:
    """A snapshot from plain lists; forced: which cells are."""
    n = len(tokens)
    held = np.isin(np.arange(n), forced)
    sure = np.asarray(confidence, np.float32)
    known = np.asarray(settled, bool)
    return Snapshot(np.asarray(tokens, np.int32), known, sure, held, 0, start, forwards, 0, finish)


def unveiled(ids: Sequence[int], seed: int = 0) -> list[Snapshot]:
    """A denoising of `ids`: every pass guesses, some guesses settle, one settled token is later revised, and the
    third pass thinks that the text ends two tokens earlier."""
    rng, n, out = np.random.default_rng(seed), len(ids), []
    order, tokens = rng.permutation(n), np.asarray(ids, np.int32)
    passes = 6
    for k in range(1, passes + 1):
        settled = np.isin(np.arange(n), order[: n * k // passes])
        sure = np.where(settled, rng.uniform(0.9, 1, n), rng.uniform(0, 0.95, n))
        shown = np.where(settled, tokens, rng.choice(tokens, n))
        if 2 <= k < 5:
            shown[order[0]] = tokens[order[-1]]  # the token that settled first has another value for a while
        cut = n - 2 * (k == 3)
        seen = [x[:cut].tolist() for x in (shown, settled, sure)]
        out.append(shot(*seen, k, forced=[int(order[1])]))
    return [*out, out[-1]._replace(finish="stop", final=n, start=n)]
