"""Laws of lookahead: whatever is drafted, the tokens are those of plain decoding, in as many passes or fewer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from tests.decode import test_decoder_transforms as transforms
from tests.decode.test_self_speculation import causal
from tests.marks import slow_except
from tests.models.test_dit import teller, witness
from tests.tiny import PATTERNS, tiny

# One program serves all of them: the number of the rule and the temperature are parameters of a row.
RULES = [
    mj.rules.confidence(), mj.rules.threshold(0.02), mj.rules.factor(0.99), mj.rules.topk_margin(),
    mj.rules.dream_entropy(), mj.rules.random(), mj.rules.ancestral(), mj.rules.slow_fast(0.1, 0.05),
    mj.rules.klass(0.01, 1.0, 1), mj.rules.credit(0.02), mj.rules.wavefront(), mj.rules.remdm_cap(0.3),
]  # fmt: skip
ROWS, TOKENS = 96, 16


@functools.cache
def exact(pattern):
    """A tiny model in fp64, whose logits no other batch rounds to another order."""
    shifted = {"shifted": "bidirectional", "seeded": "block_causal"}  # seeded: as Fast-dLLM v2
    lm = tiny(shifted.get(pattern, pattern))
    alignment = "shifted" if pattern in shifted else "same_position"
    config = dataclasses.replace(lm.model.config, dtype="float64", alignment=alignment)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), lm.params)
    return dataclasses.replace(lm, model=models.build(config), params=params)


@functools.cache
def prompts(rows=ROWS):
    rng = np.random.default_rng(5)
    return [rng.integers(10, 300, rng.integers(2, 9)).tolist() for _ in range(rows)]


@functools.cache
def decode(pattern, lookahead, name=None, rows=ROWS, many=len(RULES), **more):
    with jax.enable_x64(True):
        number = np.arange(rows) % many
        sampler = mj.rules.one_of(RULES[:many], number) if name is None else WHOLE_CANVAS[name]
        temperature = np.where(np.arange(rows) // many % 2, 1.0, 0.0)
        return mj.sample(
            exact(pattern), prompts(rows), max_tokens=TOKENS, seed=1, sampler=sampler, temperature=temperature,
            plan=mj.Plan(lookahead=lookahead, steps=12), **more,
        )  # fmt: skip


def check_same(plain, fast, lookahead):
    """The same tokens for no more passes, each of which computed at most `lookahead` drafts."""
    for row, (a, b) in enumerate(zip(plain.tokens, fast.tokens, strict=True)):
        np.testing.assert_array_equal(a, b, str(row))
    assert fast.finish == plain.finish
    assert (fast.forwards <= plain.forwards).all()
    assert (plain.evaluated == plain.forwards).all()
    assert (fast.evaluated >= fast.forwards).all()
    assert (fast.evaluated <= (1 + lookahead) * fast.forwards).all()


ALL = [(pattern, len(RULES)) for pattern in (*PATTERNS, "shifted", "seeded")]


@pytest.mark.long
@pytest.mark.parametrize("pattern, many", slow_except([("block_causal", 4), *ALL], ("block_causal", 4)))
def test_the_tokens_are_those_of_plain_decoding_in_fewer_passes(pattern, many):
    rows = 8 * many
    plain, fast = (decode(pattern, n, rows=rows, many=many) for n in (0, 3))
    check_same(plain, fast, 3)
    # A random model agrees with some of its drafts, by every rule that takes one token or a few at a time.
    number = np.arange(rows) % many
    fewer = [fast.forwards[number == i].sum() < plain.forwards[number == i].sum() for i in range(many)]
    assert sum(fewer) >= many - 1
    assert fast.passes < plain.passes and fast.forwards.sum() < 0.8 * plain.forwards.sum()


WHOLE_CANVAS = {"wino": mj.rules.wino(0.01, 0.05), "levenshtein": mj.rules.levenshtein(300, 301, 0.02, 0.02)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_CANVAS)
def test_rules_with_leave_one_out_masks_or_of_variable_length_agree_too(name):
    check_same(*(decode("bidirectional", n, name, 8) for n in (0, 2)), 2)


@pytest.mark.slow
def test_guidance_log_probabilities_and_history_are_those_of_plain_decoding():
    more = dict(rows=12, guidance=1.5, logprobs=2)
    plain, fast = (decode("bidirectional", n, history=True, **more) for n in (0, 2))
    check_same(plain, fast, 2)
    for a, b in zip(plain.logprobs, fast.logprobs, strict=True):
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    assert len(fast.history) == fast.passes
    shown = np.stack([frame.used > 0 for frame in fast.history])
    np.testing.assert_array_equal(shown.sum(0), fast.forwards)
    # The frames of a pass after which a row goes on are those of the last step that plain decoding took.
    last = {tuple(f.answer[0]) for f in plain.history}
    assert {tuple(f.answer[0]) for f in fast.history} <= last


@mj.rule
def hesitant(key, view, memory):
    """`witness` in every other step: a canvas comes back at a later time, when its logits are others."""
    proposal, memory = witness()(key, view, memory)
    canvas = jnp.where(view.step % 2 == 0, view.canvas, proposal.canvas)
    return proposal._replace(canvas=canvas), memory


def test_the_logits_of_a_timed_model_are_those_of_the_step():
    """The rule writes 60 only where the model was told the time of its view."""
    plan = mj.Plan(lookahead=3, steps=24)
    out = mj.sample(teller("bidirectional"), ["def x"], max_tokens=12, sampler=hesitant(), plan=plan)
    assert out.tokens[0].tolist() == [60] * 12


@pytest.mark.slow
def test_under_jit_and_over_four_devices_it_decodes_what_sample_does():
    _, decode = transforms.make(plan=mj.Plan(lookahead=2))
    given = transforms.params(), jnp.asarray(transforms.PROMPTS), transforms.KEYS
    assert transforms.rows_of(jax.jit(decode)(*given)) == transforms.expected()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    specs = (jax.sharding.PartitionSpec(), rows, rows)
    spread = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=rows)
    assert transforms.rows_of(jax.jit(spread)(*given)) == transforms.expected()


@pytest.mark.slow
def test_a_session_that_was_stopped_goes_on_with_its_drafts():
    with jax.enable_x64(True):
        lm, plan = exact("bidirectional"), mj.Plan(lookahead=3)
        arguments = dict(max_tokens=TOKENS, sampler=mj.rules.confidence(), plan=plan)
        whole = mj.sample(lm, prompts()[:2], **arguments)
        part = mj.sample(lm, prompts()[:2], passes=2, **arguments)
        rest = mj.sample(lm, None, state=part.state)
        pieces = [out.tokens for out in mj.stream(lm, prompts()[0], **arguments)]
    for a, b in zip(whole.tokens, rest.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert rest.forwards.tolist() == whole.forwards.tolist()
    assert list(pieces[-1]) == whole.tokens[0].tolist() and len(pieces) == whole.forwards[0]


def test_what_cannot_be_verified_is_refused():
    sample = lambda lm, lookahead=2, **more: mj.sample(
        lm,
        "def x",
        max_tokens=4,
        sampler=more.pop("sampler", None),
        plan=mj.Plan(lookahead=lookahead, **more),
    )
    with pytest.raises(ValueError, match=r"plan.lookahead is 2; allowed: 0 with plan.refresh"):
        sample(tiny("bidirectional"), refresh=mj.Refresh.dual())
    with pytest.raises(ValueError, match=r"plan.lookahead is 2; allowed: 0 with sampler.speculate"):
        sample(causal(), sampler=mj.rules.self_speculation(3))
    soft = tiny("bidirectional")
    model = soft.model._replace(condition=lambda params, logits: jnp.zeros((*logits.shape[:2], 16)))
    with pytest.raises(ValueError, match=r"plan.lookahead is 2; allowed: 0 for this model: its self-cond"):
        sample(dataclasses.replace(soft, model=model))
    with pytest.raises(ValueError, match=r"plan.lookahead is 2; allowed: 0 with schema="):
        mj.sample(tiny(), "x", schema={"type": "integer"}, plan=mj.Plan(lookahead=2))
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="lookahead is"):
            mj.Plan(lookahead=wrong)
