"""Conversion of the frames of a dispatch into the snapshots that a client reads.

A frame shows the active block of one row after one pass. A snapshot shows the whole output: the committed tokens before
the block, the block as it would be emitted now, and how many of these tokens are final. For grammar-constrained rows
the host decides which tokens are accepted (`decode.constrained`), so its tokens replace the tokens of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mercury_jax.decode.constrained import ConstrainedRow
from mercury_jax.decode.sample import LogProbs
from mercury_jax.decode.state import Frame
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.serve.engine.programs import DispatchReport
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, RequestHandle, Snapshot


@dataclass(eq=False)
class RunningRequest:
    """The host's record of a request in a slot.

    Attributes:
        handle: Receives the snapshots of the request.
        cached: Number of prompt tokens found in the prefix cache.
        recent: `Prefix.recent` of these tokens.
        revises: Whether the decoding rule may still change accepted tokens, so that only committed ones are final.
        end_think: Token id that closes the thinking; -1 for a request without thinking.
        forwards: Denoising passes so far.
        gate: Grammar state of the row; None without a grammar.
    """

    handle: RequestHandle
    cached: int
    recent: int
    revises: bool
    end_think: int = -1
    forwards: int = 0
    gate: ConstrainedRow | None = None

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens, which is the position of the first output token."""
        return len(self.handle.request.prompt)


def pass_snapshots(
    run: RunningRequest, frames: Frame, passes: int, report: DispatchReport, slot: int, ends: tuple[int, ...]
) -> list[Snapshot]:
    """Makes the snapshots of one request from a dispatch, and tells the grammar of a constrained one what it adds.

    Returns:
        One snapshot per denoising pass if the request has `frames`, otherwise one snapshot of the last pass. The list
        is empty if the row did not denoise, for example because it was prefilling.
    """
    denoised = [i for i in range(passes) if frames.used[i, slot] > 0]
    before, run.forwards = run.forwards, run.forwards + len(denoised)
    first = 0 if run.handle.request.frames else max(len(denoised) - 1, 0)
    tokens = np.asarray(report.tokens[slot])
    shown: list[Snapshot] = []
    for k, i in enumerate(denoised):
        # If a row under a grammar waits for the host, the host decides how much of its last pass is committed;
        # `Slots.apply_grammars` writes that back. The device has committed the other passes.
        waits = bool(report.waits[slot]) and k == len(denoised) - 1
        if run.gate is not None and run.gate.begun:
            start, size = int(frames.start[i, slot]), int(frames.used[i, slot])
            # A model that decides one token a pass may have ended the text: its end is no token of it.
            if not waits:
                size = min(size, int(report.end[slot]) - start)
            proposal: Any = frames.answer[i, slot, :size], frames.accepted[i, slot, :size]
            run.gate.propose(start, *proposal, on_device=not waits)
        elif run.gate is not None and waits:  # this pass closed the thinking
            run.gate.begin(int(report.committed[slot]), waits=True)
        if k >= first:
            snapshot = _pass_snapshot(run, frames, i, slot, tokens, ends, before + k + 1)
            shown.append(snapshot if run.gate is None else constrained(run, run.gate, snapshot))
    return shown


def _pass_snapshot(
    run: RunningRequest,
    frames: Frame,
    i: int,
    slot: int,
    text: np.ndarray,
    ends: tuple[int, ...],
    forwards: int,
) -> Snapshot:
    """Makes the snapshot of one pass.

    Args:
        text: Tokens of the row after the dispatch, by absolute position [S].
    """
    start, n = int(frames.start[i, slot]), int(frames.used[i, slot])
    prompt = run.prompt_length
    first = max(start, prompt)  # a block may begin inside the prompt; only its output part is shown
    in_block = slice(first - start, n)
    # Output = committed tokens [prompt, first) + the rest of the block [first, start + n). `text` is newer than the
    # frame, but committed tokens do not change, so the tokens before the block are the same. They include the token
    # that closes thinking, if thinking is over.
    committed = text[prompt:first]
    tokens = np.concatenate([committed, frames.answer[i, slot, in_block]]).astype(np.int32)
    accepted = np.concatenate([np.ones(len(committed), bool), frames.accepted[i, slot, in_block]])
    confidence = np.concatenate([np.ones(len(committed), np.float32), frames.confidence[i, slot, in_block]])
    # Tokens after an accepted end of text are not shown. Likewise, as long as the thinking is not committed, tokens
    # after the token that closes it are not shown: from there on, the answer is decoded in a new block.
    stop = np.isin(tokens, ends) & accepted
    size = int(np.argmax(stop)) if stop.any() else len(tokens)
    if run.end_think >= 0 and run.end_think not in committed:
        close = (tokens == run.end_think) & accepted
        size = min(size, int(np.argmax(close)) + 1) if close.any() else size
    block = min(len(committed), size)
    # Final tokens: if the rule may revise accepted tokens, only the committed ones; otherwise all tokens before the
    # first one that is not accepted.
    final = block if run.revises else int(np.argmin(np.append(accepted[:size], False)))
    forced = np.zeros(size, bool)
    shown = tokens[:size], accepted[:size], confidence[:size], forced
    return Snapshot(*shown, final, block, forwards, run.cached)


def constrained(run: RunningRequest, gate: ConstrainedRow, shown: Snapshot) -> Snapshot:
    """Applies a grammar to a snapshot: exactly the tokens that the grammar has committed are final."""
    if gate.first is None:  # still thinking
        return shown
    # Output indices: [0, answer) thinking, [answer, front) committed by the grammar, [front, ...) still proposed.
    answer, front, n = gate.first - run.prompt_length, gate.frontier - run.prompt_length, len(gate.committed)
    # If thinking used up its budget, it was closed after the pass that the snapshot shows, which therefore lacks the
    # closing token.
    missing = max(answer - len(shown.tokens), 0)

    def joined(old: np.ndarray, closing: float, committed: np.ndarray) -> np.ndarray:
        thinking = np.concatenate([old[:answer], np.full(missing, closing, old.dtype)])
        return np.concatenate([thinking, committed, old[front:]]).astype(old.dtype)

    # Tokens that the grammar forces may lie beyond the block of the pass; they have no confidence and get 1.
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
    """Makes the last snapshot of a row that is done."""
    text, prompt, end = np.asarray(report.tokens[slot]), run.prompt_length, int(report.end[slot])
    nan_step = int(report.nan_step[slot])
    if nan_step >= 0:
        return early_end(run.handle, "error", f"the model's logits are NaN in denoising pass {nan_step}")
    tokens = text[prompt:end].astype(np.int32)
    n, before = len(tokens), run.handle.latest or EMPTY_SNAPSHOT
    # The report has no confidences: they are taken from the last published snapshot.
    confidence, forced = np.ones(n, np.float32), np.zeros(n, bool)
    seen = min(n, len(before.tokens))
    confidence[:seen], forced[:seen] = before.confidence[:seen], before.forced[:seen]
    if run.gate is not None and run.gate.first is not None:
        forced[run.gate.first - prompt :] = run.gate.forced
    kept = None
    if logprobs is not None:
        k, output = run.handle.request.logprobs or 0, slice(prompt, end)
        kept = LogProbs(logprobs.chosen[output], logprobs.top_ids[output, :k], logprobs.top[output, :k])  # type: ignore[arg-type]
    # `end` is the position after the last token of the answer; an end of text there is not part of the answer.
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
    """Makes the last snapshot of a request that ends early."""
    last = handle.latest or EMPTY_SNAPSHOT
    return last.truncated(last.final)._replace(finish=finish, message=message)
