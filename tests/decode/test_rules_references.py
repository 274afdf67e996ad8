"""Rules that revise, pass by pass, as their references decoded the same logits; goldens/README.md tells how."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode import stopping
from mercury_jax.decode.rules import remask, uniform, variable_length
from mercury_jax.decode.rules.remask import editing, self_correct
from mercury_jax.decode.token_stats import forbid, token_stats
from tests.decode.rule_loop import act
from tests.decode.views import KEY, view_of

M = 11  # the mask
LEAD = 2  # given tokens in front, so that no index of a rule may count from the block's first


@functools.cache
def kept():
    with np.load(Path(__file__).parent / "goldens" / "revising.npz") as file:
        return dict(file)


def fronted(logits, lead=LEAD):
    """The logits behind those of the given tokens, which say another token for sure."""
    front = np.full((lead, logits.shape[-1]), -5.0, np.float32)
    front[:, 0] = 5.0
    return np.concatenate([front, logits.astype(np.float32)])


def behind(tokens):
    return jnp.asarray([1] * LEAD + [int(x) for x in tokens], jnp.int32)


def seen(logits, tokens, step=0, **more):
    """What a rule sees of the reference's canvas in a pass that is far from the last."""
    canvas = behind(tokens)
    editable = jnp.arange(len(canvas)) >= LEAD
    numbers = dict(step=jnp.asarray(step), steps=jnp.asarray(99), editable=editable)
    return view_of(fronted(logits), canvas, editable & (canvas == M), mask=M, **(numbers | more))


def same(proposal, tokens):
    assert proposal.canvas.tolist() == behind(tokens).tolist()


def decodings(name, logits="logits"):
    return zip(kept()[logits], kept()[name], strict=True)


def test_editing_is_llada21s_sampler_and_stops_with_it():
    rule, stop, edits = editing(0.95, 0.6), stopping.fixed_point(patience=1, limit=16), 0
    for (logits, theirs), passes in zip(decodings("editing"), kept()["editing_passes"], strict=True):
        memory = stop.init(behind(theirs[0]), 12)
        for step in range(passes):
            v = seen(logits[min(step, len(logits) - 1)], theirs[step], step)
            proposal, _ = act(KEY, rule, v)
            same(proposal, theirs[step + 1])
            done, memory = stop(v, proposal, memory)
            assert bool(done) == (step == passes - 1)
            edits += ((theirs[step] != M) & (theirs[step] != theirs[step + 1])).sum()
    assert edits > 10


def test_wino_drafts_and_masks_again_as_its_reference():
    rule, again = remask.wino(0.6, 0.9), 0
    for (logits, theirs), blind in zip(decodings("wino"), kept()["blind_logits"], strict=True):
        memory = rule.init(behind(theirs[0]), 12)
        for step in range(len(logits)):
            if not (theirs[step] == M).any():
                break
            v = seen(logits[step], theirs[step], step)
            shadow = forbid(jnp.asarray(fronted(blind[step])), (M,))
            v = v._replace(leave_one_out=token_stats(shadow, v.canvas, v.canvas, jnp.asarray(-1)))
            proposal, memory = act(KEY, rule, v, memory)
            same(proposal, theirs[step + 1])
            again += ((theirs[step] != M) & (theirs[step + 1] == M)).sum()
    assert again > 10


REMDM = [
    (remask.remdm_cap(0.3), ()), (remask.remdm_rescale(0.4), ()), (remask.remdm_confidence(1.0), "sure"),
    (remask.remdm_loop(0.05, 0.55, 0.05, 0.9), ()),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("which", range(4), ids=[rule.name for rule, _ in REMDM])
def test_remdm_has_its_references_transition_probabilities(which, monkeypatch):
    """A uniform just under the reference's probability moves a position, one just above does not."""
    (rule, memory), canvas = REMDM[which], kept()["remdm_canvas"]
    masked = np.concatenate([[False] * LEAD, canvas == M])
    memory = jnp.concatenate([jnp.ones(LEAD), jnp.minimum(kept()["remdm_sure"], 1.0)]) if memory else ()
    for times, q in zip(kept()["remdm_times"], kept()["remdm"][which], strict=True):
        t, s = times
        v = seen(kept()["remdm_logits"], canvas)
        to_mask = np.concatenate([np.zeros(LEAD), q[:, M]])
        moves = np.where(masked, 1 - to_mask, to_mask)
        token = np.asarray(jax.nn.softmax(v.logits))[masked] * moves[masked][:, None]
        np.testing.assert_allclose(q[canvas == M][:, :M], token[:, :M], atol=1e-6)
        for u, want in ((np.maximum(moves - 2e-5, 0), moves > 2e-5), (moves + 2e-5, moves < 0)):
            monkeypatch.setattr(jax.random, "uniform", lambda key, shape, u=u: jnp.asarray(u, jnp.float32))
            monkeypatch.setattr(
                remask, "reverse_times", lambda view, eps, times=times: tuple(map(jnp.asarray, times))
            )
            after = rule(KEY, v, memory)[0].canvas
            monkeypatch.undo()
            np.testing.assert_array_equal(np.asarray(after == M) != masked, want, str((t, s)))


def test_entropy_bound_and_steady_are_diffusion_gemmas():
    stop, stood = stopping.steady(entropy=0.35, patience=1), 0
    given = jnp.zeros(LEAD, jnp.int32)
    for case, gamma in enumerate((0.1, 1.0, 4.0)):
        logits, theirs, drawn, fresh, over = (
            kept()[k][case] for k in ("bound_logits", "entropy_bound", "drawn", "fresh", "steady")
        )
        memory = stop.init(behind(theirs[0]), 12)
        for step in range(len(logits)):
            v = seen(logits[step], theirs[step - 1], step, noise=jnp.concatenate([given, fresh[step]]))
            sample = jnp.concatenate([given, drawn[step]])
            v = v._replace(masked=v.editable, stats=v.stats._replace(sample=sample))
            proposal, _ = act(KEY, uniform.entropy_bound(gamma), v)
            same(proposal, theirs[step])
            assert proposal.answer.tolist() == behind(logits[step].argmax(-1)).tolist()
            done, memory = stop(v, proposal, memory)
            assert bool(done) == over[step]
            stood += over[step]
    assert 3 < stood < 50


def test_levenshtein_is_llada22s_sampler_until_that_comes_back_to_a_canvas():
    """From there on the two break the loop in their own ways."""
    rule, moved, followed = variable_length.levenshtein(9, 10, 0.9, 0.5), 0, 0
    for logits, theirs in decodings("levenshtein", "indel_logits"):
        memory = rule.init(behind(theirs[0]), 12)
        for step in range(len(logits)):
            v, been = seen(logits[step], theirs[step], step), (theirs[: step + 1] == theirs[step + 1]).all(1)
            if been.any() and (theirs[step] == M).any():
                break
            proposal, memory = act(KEY, rule, v, memory)
            same(proposal, theirs[step + 1])
            followed, moved = followed + 1, moved + int((proposal.source != jnp.arange(len(v.canvas))).any())
    assert followed > 20 and moved > 5


@pytest.mark.long
def test_expand_is_dreamons_generator():
    rule, grown, shrunk, full = variable_length.expand(10, 9, 1.0), 0, 0, 0
    for (logits, theirs), sizes in zip(decodings("expand", "grow_logits"), kept()["expand_n"], strict=True):
        width = theirs.shape[1]
        memory, at = rule.init(jnp.asarray(theirs[0], jnp.int32), 12), jnp.arange(width)
        for step in range(len(logits)):
            n, after = int(sizes[step]), int(sizes[step + 1])
            editable = (at > 0) & (at < n - 2)  # one token before the hole, two behind
            canvas = jnp.asarray(theirs[step], jnp.int32)
            if not bool((editable & (canvas == M)).any()):
                break
            v = view_of(
                logits[step].astype(np.float32), canvas, editable & (canvas == M), mask=M, editable=editable,
                used=jnp.asarray(n), growth=jnp.asarray(width - n), step=jnp.asarray(step), steps=jnp.asarray(99),
            )  # fmt: skip
            proposal, memory = act(KEY, rule, v, memory)
            assert int(proposal.used) == after, step
            assert proposal.canvas[:after].tolist() == theirs[step + 1][:after].tolist(), step
            grown, shrunk, full = grown + (after > n), shrunk + (after < n), full + (n == width)
    assert grown > 5 and shrunk > 1 and full > 3


def test_self_correct_is_gidds_correction_step(monkeypatch):
    # Not the case of temperature 0.1: most draws have probability 1 in fp32 there, and torch picks among ties.
    for case, count, t in ((1, 2, 0.5), (2, 3, 1.0)):
        rule, theirs = self_correct(0.9, t, count), kept()["self_correct"][case]
        for step, u in enumerate(kept()["uniforms"][case][:8]):
            v = seen(kept()["logits"][case, step], theirs[step], step)
            u = jnp.concatenate([jnp.full(LEAD, 0.5), u])
            monkeypatch.setattr(jax.random, "uniform", lambda key, shape, u=u: u)
            proposal, _ = rule(KEY, v, ())
            monkeypatch.undo()
            same(proposal, theirs[step + 1])


def test_the_bridge_is_duos_posterior():
    prior, ids = kept()["duo_prior"], np.arange(len(kept()["duo_prior"]))
    stands = ids[:, None] == ids  # [x_0, x_t]
    for (alpha_t, alpha_s), theirs in zip(kept()["duo_keeps"], kept()["duo"], strict=True):
        old, new = uniform.bridge(
            jnp.asarray(stands), jnp.asarray(alpha_t), jnp.asarray(alpha_s), jnp.asarray(len(ids))
        )
        old, new = np.asarray(old)[..., None], np.asarray(new)[..., None]
        ours = old * np.eye(len(ids)) + new * np.eye(len(ids))[:, None] + (1 - old - new) / len(ids)
        np.testing.assert_allclose(ours, theirs[:-1], atol=2e-6)
        # Its form for a model that has not yet seen x_t: the same, mixed by p(x_0 | x_t).
        weight = prior[:, None] * (alpha_t * stands + (1 - alpha_t) / len(ids))
        mixed = np.einsum("xt,xts->ts", weight / weight.sum(0), ours)
        np.testing.assert_allclose(mixed, theirs[-1], atol=2e-6)
