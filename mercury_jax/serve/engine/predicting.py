"""Requests with a predicted answer, decoded by the code of `mj.sample(draft_text=)`.

A pass that verifies a prediction is up to 512 tokens wide; in a slot every row of the batch would pay for that width.
So these requests are decoded one at a time by a `SideWorker`, in a row of their own, whose sizes are fixed: all
requests share a program, except that logits processors and log-probabilities each have their own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from mercury_jax.decode.defaults import complete_sampler, default_editor
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, rows_of, start
from mercury_jax.decode.sample import LogProbs
from mercury_jax.decode.sampler import Sampler
from mercury_jax.decode.session import Session, advance
from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.sampling_params import RuleSet, build_sampler, sampler_level
from mercury_jax.serve.engine.side_worker import RequestCancelled
from mercury_jax.types import LM

EXAMPLE = EngineRequest(prompt=(0,) * 32, max_tokens=16, prediction=(0,) * 16)


def decode_predicted(
    lm: LM, rules: RuleSet, context: int, handle: RequestHandle, stopping: Callable[[], bool]
) -> Snapshot:
    """Decodes a request with a prediction, and publishes a snapshot of each pass. Implements `side_worker.Decode`."""
    session = start(lm, _request(lm, rules, context, handle.request))
    while True:
        if handle.cancelled or stopping():
            raise RequestCancelled
        session, _, _ = advance(lm, session, 1)
        snapshot = _snapshot(lm, session, handle.request)
        if snapshot.finish is not None:
            return snapshot
        if len(snapshot.tokens):
            handle.publish(snapshot)


def _request(lm: LM, rules: RuleSet, context: int, request: EngineRequest) -> Request:
    """Makes the request of the decoder; its row has room for the whole context, whatever the prompt.

    The canvas of a bidirectional model is its whole row, which is therefore only as long as it must be.
    """
    rows = rows_of([Prompt(list(request.prompt), True)], request.max_tokens, request.seed, [request.thinking])
    if lm.model.config.pattern != "bidirectional":
        wide = lambda x: np.pad(np.asarray(x), ((0, 0), (0, context - x.shape[1])))
        rows = rows._replace(tokens=wide(rows.tokens), given=wide(rows.given))
    marks = lm.tokenizer.thinking
    return Request(
        sampler=_sampler(lm, rules, request),
        rows=rows,
        predictions=[list(request.prediction)],
        prompts=[Prompt(list(request.prompt), True)],
        logprobs=request.logprobs,
        end_thinking=marks.close if marks is not None and request.thinking else None,
    )


def _sampler(lm: LM, rules: RuleSet, request: EngineRequest) -> Sampler:
    """Makes the sampler as `mj.sample(draft_text=)` does: of verification, or of a rule that replaces tokens.

    The model's own processors and temperature belong to its own rule.
    """
    sampler = build_sampler(rules, request, sampler_level(request))
    if lm.model.config.predicts_next:
        return sampler._replace(speculate=0)
    processors, temperature = sampler.processors[len(rules.own.processors) :], request.temperature
    editor = sampler._replace(
        rule=default_editor(lm), processors=processors, stopping=None, temperature=temperature
    )
    return complete_sampler(editor, lm.corruption)


def _snapshot(lm: LM, session: Session, request: EngineRequest) -> Snapshot:
    """Makes a snapshot of what is committed."""
    state, prompt = session.state, len(request.prompt)
    text, committed, limits, done, records, accepted = jax.tree.map(
        lambda x: np.asarray(x[0]),
        jax.device_get(
            (state.tokens, state.committed, state.limits, state.done, state.records, state.method.accepted)
        ),
    )
    if records.nan_step >= 0:
        raise ValueError(f"the model's logits are NaN in denoising pass {int(records.nan_step)}")
    end = int(limits.end if done else committed)
    tokens = text[prompt:end].astype(np.int32)
    n, yes, finish, kept = len(tokens), np.ones(end - prompt, bool), None, None
    if done:
        finish = "stop" if int(text[end]) in (lm.model.config.eos, *lm.model.config.ends) else "length"
        if request.logprobs is not None:
            kept = LogProbs(*(x[prompt:end] for x in records.logprobs))
    return Snapshot(
        tokens, yes, yes.astype(np.float32), ~yes, n, n, int(records.nfe), 0, finish, "", kept,
        predicted=min(int(accepted), len(request.prediction)),
    )  # fmt: skip
