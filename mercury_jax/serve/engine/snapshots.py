"""From the frames of a dispatch to the snapshots that a request's readers see.

A frame shows the active block of a row after one pass. A snapshot shows the whole output: what is committed in front of
the block, the block as it would be emitted now, and how much of both is final. For grammar-constrained rows the host
decides what is accepted (`decode.constrained`), so its tokens replace those of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mercury_jax.decode.constrained import ConstrainedRow
from mercury_jax.decode.sample import LogProbs
from mercury_jax.decode.state import Frame
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.serve.engine.programs import DispatchReport
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, RequestHandle, Snapshot


@dataclass(eq=False)
class RunningRequest:
    """A request in a slot, as the host sees it.

    Attributes:
        handle: Where its snapshots go.
        cached: Tokens of its prompt found in the prefix cache.
        revises: Its rule may still change accepted tokens.
        end_think: Id that closes its thinking; -1 where it does not think.
        forwards: Forward passes so far.
        gate: State of its grammar.
    """

    handle: RequestHandle
    cached: int
    revises: bool
    end_think: int = -1
    forwards: int = 0
    gate: ConstrainedRow | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, and so the position where the output begins."""
        return len(self.handle.request.prompt)


def pass_snapshots(
    run: RunningRequest, frames: Frame, passes: int, report: DispatchReport, slot: int, ends: tuple[int, ...]
) -> list[Snapshot]:
    """Snapshots of a dispatch: of every pass where the request asks for all frames, else of the last one.

    Args:
        run: The request; its count of forward passes is updated.
        frames: [passes, B, ...] on the host.
        passes: How many of them were made.
        report: The rows after the dispatch, on the host.
        slot: The request's row.
        ends: Ids that end an answer.

    Returns:
        None, one or several; a pass in which the row only prefilled has none.
    """
    denoised = [i for i in range(passes) if frames.used[i, slot] > 0]
    before, run.forwards = run.forwards, run.forwards + len(denoised)
    first = 0 if run.handle.request.frames else max(len(denoised) - 1, 0)
    tokens = np.asarray(report.tokens[slot])
    return [
        _pass_snapshot(run, frames, denoised[k], slot, tokens, ends, before + k + 1)
        for k in range(first, len(denoised))
    ]


def _pass_snapshot(
    run: RunningRequest,
    frames: Frame,
    i: int,
    slot: int,
    text: np.ndarray,
    ends: tuple[int, ...],
    forwards: int,
) -> Snapshot:
    start, n = int(frames.start[i, slot]), int(frames.used[i, slot])
    prompt = run.prompt_length
    first = max(start, prompt)  # a block may begin inside the prompt
    in_block = slice(first - start, n)
    # What stands in front of the block is committed, the token that closes thinking included.
    committed = text[prompt:first]
    tokens = np.concatenate([committed, frames.answer[i, slot, in_block]]).astype(np.int32)
    accepted = np.concatenate([np.ones(len(committed), bool), frames.accepted[i, slot, in_block]])
    confidence = np.concatenate([np.ones(len(committed), np.float32), frames.confidence[i, slot, in_block]])
    # Nothing is shown behind an accepted end of text. While the request thinks, nothing behind the token that closes
    # thinking either: the block is decoded anew from there, as the answer.
    stop = np.isin(tokens, ends) & accepted
    size = int(np.argmax(stop)) if stop.any() else len(tokens)
    if run.end_think >= 0 and run.end_think not in committed:
        close = (tokens == run.end_think) & accepted
        size = min(size, int(np.argmax(close)) + 1) if close.any() else size
    block = min(len(committed), size)
    final = block if run.revises else int(np.argmin(np.append(accepted[:size], False)))
    forced = np.zeros(size, bool)
    shown = tokens[:size], accepted[:size], confidence[:size], forced
    return Snapshot(*shown, final, block, forwards, run.cached)


def constrained(run: RunningRequest, gate: ConstrainedRow, shown: Snapshot) -> Snapshot:
    """A snapshot as its grammar leaves it: tokens that the grammar has committed are final, no others.

    Args:
        run: The request.
        gate: State of its grammar, after it has seen the pass.
        shown: The snapshot of the pass.

    Returns:
        The snapshot; unchanged while the request thinks.
    """
    if gate.first is None:  # still thinking
        return shown
    answer, front, n = gate.first - run.prompt_length, gate.frontier - run.prompt_length, len(gate.committed)
    # When thinking fills its budget, it is closed after the pass that was shown: the closing token is missing there.
    missing = max(answer - len(shown.tokens), 0)

    def joined(old: np.ndarray, closing: float, committed: np.ndarray) -> np.ndarray:
        thinking = np.concatenate([old[:answer], np.full(missing, closing, old.dtype)])
        return np.concatenate([thinking, committed, old[front:]]).astype(old.dtype)

    known = shown.confidence[answer:front]
    return shown._replace(
        tokens=joined(shown.tokens, run.end_think, np.asarray(gate.committed)),
        accepted=joined(shown.accepted, True, np.ones(n)),
        confidence=joined(shown.confidence, 1.0, np.append(known, np.ones(n - len(known)))),
        forced=joined(shown.forced, False, np.asarray(gate.forced)),
        final=front,
    )


def final_snapshot(
    run: RunningRequest,
    report: DispatchReport,
    slot: int,
    ends: tuple[int, ...],
    logprobs: LogprobBuffer | None,
) -> Snapshot:
    """The last snapshot of a row that is done.

    Args:
        run: The request.
        report: The rows after the dispatch, on the host.
        slot: The request's row.
        ends: Ids that end an answer.
        logprobs: The row's log-probabilities on the host. None: the request does not ask for them.

    Returns:
        A snapshot with finish "stop", "length", or "error" where the model's logits were NaN.
    """
    text, prompt, end = np.asarray(report.tokens[slot]), run.prompt_length, int(report.end[slot])
    nan_step = int(report.nan_step[slot])
    if nan_step >= 0:
        return early_end(run.handle, "error", f"the model's logits are NaN in denoising pass {nan_step}")
    tokens = text[prompt:end].astype(np.int32)
    n, before = len(tokens), run.handle.latest or EMPTY_SNAPSHOT
    confidence, forced = np.ones(n, np.float32), np.zeros(n, bool)
    seen = min(n, len(before.tokens))
    confidence[:seen], forced[:seen] = before.confidence[:seen], before.forced[:seen]
    if run.gate is not None and run.gate.first is not None:
        forced[run.gate.first - prompt :] = run.gate.forced
    kept = None
    if logprobs is not None:
        k, output = run.handle.request.logprobs or 0, slice(prompt, end)
        kept = LogProbs(logprobs.chosen[output], logprobs.top_ids[output, :k], logprobs.top[output, :k])  # type: ignore[arg-type]
    finish = "stop" if int(text[end]) in ends else "length"
    return Snapshot(
        tokens,
        np.ones(n, bool),
        confidence,
        forced,
        n,
        n,
        int(report.nfe[slot]),
        run.cached,
        finish,
        "",
        kept,
    )


def early_end(handle: RequestHandle, finish: str, message: str = "") -> Snapshot:
    """The last snapshot of a request that ends early; its final tokens stay.

    Args:
        handle: The request.
        finish: "cancelled" or "error".
        message: The error.

    Returns:
        The final tokens with their finish.
    """
    last = handle.latest or EMPTY_SNAPSHOT
    return last.truncated(last.final)._replace(finish=finish, message=message)
