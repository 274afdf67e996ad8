"""An engine that publishes snapshots written by the test, without a model or a device."""

import threading
import time
from typing import Any

import numpy as np

from mercury_jax.serve.engine.request import (
    EMPTY_SNAPSHOT,
    ContextLengthExceeded,
    EngineConfig,
    EngineStats,
    RequestHandle,
    RequestRejected,
)
from mercury_jax.serve.engine.sampling_params import rule_set


def snapshot(tokens, final=None, finish=None, **fields):
    """A snapshot with these tokens, of which the first `final` can no longer change."""
    tokens = np.asarray(tokens, np.int32)
    final = len(tokens) if final is None else final
    made = EMPTY_SNAPSHOT._replace(
        tokens=tokens, accepted=np.arange(len(tokens)) < final, confidence=np.ones(len(tokens), np.float32),
        forced=np.zeros(len(tokens), bool), final=final, start=final, forwards=1 + final, finish=finish,
    )  # fmt: skip
    return made._replace(**fields)


RULES = {}  # by the identity of the model


def rules_of(lm):
    """The rules that an engine of this model offers by default."""
    if id(lm) not in RULES:
        RULES[id(lm)] = lm, rule_set(lm)
    return RULES[id(lm)][1]


class ScriptedEngine:
    """Publishes the snapshots of `script` (or of `script(job)`) for every job, `pause` seconds apart."""

    def __init__(self, lm, script=(), pause=0.0, slots=4, queue=8):
        self.lm, self.script, self.pause = lm, script, pause
        self.config, self.context = EngineConfig(slots=slots, queue=queue), 512
        self.block = 32
        self.ready, self.closing = True, False
        self.tickets, self.gate = [], threading.Event()
        self.gate.set()

    @property
    def rules(self):
        return rules_of(self.lm)

    def submit(self, job):
        if self.closing:
            raise RequestRejected("the server is closing", 5.0, closing=True)
        if len(job.prompt) + job.max_tokens + job.thinking > self.context:
            raise ContextLengthExceeded(len(job.prompt) + job.max_tokens, self.context)
        ticket = RequestHandle(job, lambda: None)
        self.tickets.append(ticket)
        threading.Thread(target=self._play, args=(ticket,), daemon=True).start()
        return ticket

    def _play(self, ticket):
        script: Any = self.script(ticket.request) if callable(self.script) else self.script
        for shown in script:
            self.gate.wait(20)
            time.sleep(self.pause)
            if ticket.cancelled:
                shown = (ticket.latest or EMPTY_SNAPSHOT)._replace(finish="cancelled")
            ticket.publish(shown)

    def stats(self):
        running = sum(not ticket.finished for ticket in self.tickets)
        done = sum(ticket.finished for ticket in self.tickets)
        return EngineStats(0, running, self.config.slots, 512, 0, 0, 0, len(self.tickets), done, *[0] * 9)

    def drain(self, timeout=None):
        self.closing = True
        until = time.monotonic() + (timeout or 0)
        while time.monotonic() < until and any(not ticket.finished for ticket in self.tickets):
            time.sleep(0.01)
        return True

    def stop(self):
        self.closing = True
        for ticket in self.tickets:
            ticket.publish((ticket.latest or EMPTY_SNAPSHOT)._replace(finish="cancelled"))

    def start(self):
        self.ready = True


def text_snapshots(lm, *texts, finish="stop"):
    """Snapshots of an answer that grows from text to text; the last one has the finish reason."""
    ids = [lm.tokenizer.encode(text) for text in texts]
    whole = ids[-1]
    shown = [snapshot(whole[: len(part)]) for part in ids[:-1]]
    return [*shown, snapshot(whole, finish=finish)]
