"""Laws of the decoder: prompts stay, finished rows stand still, rows do not see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import request, session as programs
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.registration import rule
from mercury_jax.decode.sampler import accept
from mercury_jax.decode.session import advance
from mercury_jax.decode.state import admit
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["def x", "for value in range(count):\n    print(total", "return y if x"]


def answers(lm, prompts=PROMPTS, seed=5, **more):
    """Three prompts and one rule in most tests below: each pattern compiles few programs."""
    return mj.sample(lm, prompts, max_tokens=12, sampler=mj.rules.ancestral(), seed=seed, **more)


def begun(lm, prompts, seed=0, short=None):
    """A session that has not made a pass. short: tokens of the first row's answer, where they differ."""
    rows = request.rows_of([Prompt(lm.tokenizer.encode(p), False) for p in prompts], 12, seed)
    if short is not None:
        rows.end[0] = rows.committed[0] + short
    return request.start(lm, request.Request(sampler=mj.rules.ancestral(), plan=mj.Plan(), rows=rows))


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_prompts_are_unchanged_and_answers_complete(pattern):
    lm = tiny(pattern)
    ids = [lm.tokenizer.encode(p) for p in PROMPTS]
    session, _, _ = advance(lm, begun(lm, PROMPTS), None)
    text, total = np.asarray(session.state.tokens), np.asarray(session.state.limits.end)
    for row, prompt, end in zip(text, ids, total, strict=False):
        assert row[: len(prompt)].tolist() == prompt
        assert len(prompt) <= end <= len(prompt) + 12
        assert not np.isin(
            row[len(prompt) : end], [lm.tokenizer.mask, lm.tokenizer.pad, lm.tokenizer.eos]
        ).any()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_finished_rows_stand_still_bit_for_bit(pattern):
    lm = tiny(pattern)
    session = begun(lm, PROMPTS, short=1)
    # One pass at a time, to look at the row in the very pass that finished it.
    for _ in range(8):
        session, _, _ = advance(lm, session, 1)
        if np.asarray(session.state.done)[0]:
            break
    assert np.asarray(session.state.done).tolist() == [
        True,
        False,
        False,
        True,
    ]  # the last only fills the bucket
    # Typed keys are not numbers: compare their bits.
    bare = lambda s: jax.device_get(s._replace(key=jax.random.key_data(s.key)))
    before = jax.tree.map(np.copy, bare(session.state))
    for _ in range(3):
        session, _, _ = advance(lm, session, 1)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), before, bare(session.state))
    assert not np.array_equal(before.canvas[1], session.state.canvas[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_other_neighbours_same_text(pattern):
    lm = tiny(pattern)
    first, other = answers(lm), answers(lm, [PROMPTS[0], PROMPTS[2], "x y z"])
    np.testing.assert_array_equal(first.tokens[0], other.tokens[0])
    assert first.forwards[0] == other.forwards[0]


def wide(pattern):
    """The tiny model in float64; call under x64."""
    lm = tiny(pattern, dtype="float64")
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.float64), lm.params))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "causal_encoder"))
def test_batch_size_changes_nothing_in_x64(pattern):
    with jax.enable_x64(True):
        several, alone = answers(wide(pattern)), answers(wide(pattern), PROMPTS[0])
    np.testing.assert_array_equal(several.tokens[0], alone.tokens[0])


@pytest.mark.long
def test_four_devices_give_the_text_of_one_in_x64():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True):
        lm = wide("causal_encoder")
        for a, b in zip(answers(lm).tokens, answers(lm, mesh=mesh).tokens, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_how_a_prompt_is_chunked_changes_nothing_in_x64(monkeypatch):
    long = " ".join(PROMPTS * 2)
    with jax.enable_x64(True):
        lm = wide("causal_encoder")
        quick = answers(lm, long)
        monkeypatch.setattr(request, "prefill_program", lambda config, params, state, width: state)
        narrow = answers(lm, long)
    np.testing.assert_array_equal(quick.tokens[0], narrow.tokens[0])


def test_a_seed_repeats_and_another_differs():
    first, again, other = (answers(tiny(), seed=seed).texts for seed in (1, 1, 4))
    assert first == again != other


def test_a_stopped_call_goes_on_where_it_stood():
    lm = tiny()
    whole, part = answers(lm), answers(lm, passes=5)
    assert part.finish == ["paused"] * 3 and part.state is not None and not part.state.done
    rest = mj.sample(lm, None, state=part.state)
    assert rest.texts == whole.texts and rest.forwards.tolist() == whole.forwards.tolist()
    with pytest.raises(ValueError, match="finish"):
        mj.sample(lm, PROMPTS, state=part.state)


def compiled() -> int:
    """How many programs of the decoding loop there are."""
    return programs.run_program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.long
def test_one_program_serves_a_bucket_of_shapes_and_every_number():
    lm = tiny()
    mj.sample(lm, PROMPTS[:2], max_tokens=12, sampler=mj.rules.threshold(0.9))
    before = compiled()
    for prompts, most, p in ((PROMPTS[1:], 9, 0.5), (PROMPTS[:2], 20, 0.99), (["x", "y"], 1, 0.0)):
        mj.sample(
            lm, prompts, max_tokens=most, sampler=mj.rules.threshold(p), seed=most, plan=mj.Plan(steps=most)
        )
    assert compiled() == before


def test_rows_take_their_own_knobs():
    lm = tiny()
    out = mj.sample(lm, PROMPTS[:2], max_tokens=16, sampler=mj.rules.threshold(np.array([0.0, 1.0])))
    # Row 0 accepts everything at once, two blocks; row 1 only the best token of each pass.
    assert out.forwards.tolist()[0] == 2 and out.forwards[1] > 2


@rule
def ending_third(key, view, memory):
    """Everything at once, with an end of text at the third editable position."""
    third = view.editable & (jnp.cumsum(view.editable) == 3)
    drawn = jnp.where(third, 3, jnp.where(view.editable, 319, view.canvas))
    return accept(view, view.masked)._replace(canvas=drawn, answer=drawn), memory


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_end_of_text_ends_the_answer(pattern):
    lm = tiny(pattern)
    out = mj.sample(lm, PROMPTS[0], max_tokens=20, sampler=ending_third())
    assert out.finish == ["stop"] and out.tokens[0].tolist() == [319, 319] and out.forwards.tolist() == [1]


def test_admit_replaces_one_row_and_leaves_its_neighbours():
    lm = tiny()
    session, one = begun(lm, PROMPTS, seed=5), begun(lm, ["x y z"], seed=9)
    for _ in range(5):
        session, _, _ = advance(lm, session, 1)
    assert one.state.tokens.shape[1] == session.state.tokens.shape[1]
    session = dataclasses.replace(session, state=admit(session.state, 1, one.state))
    session, _, _ = advance(lm, session, None)
    alone = answers(lm, [PROMPTS[0], "x y z", PROMPTS[2]])
    text = np.asarray(session.state.tokens)
    for row in (0, 2):
        start = len(lm.tokenizer.encode(PROMPTS[row]))
        said = alone.tokens[row]
        np.testing.assert_array_equal(text[row, start : start + len(said)], said)
    assert text[1, :3].tolist() == lm.tokenizer.encode("x y z") and bool(session.state.done.all())


@pytest.mark.long
def test_hybrid_and_uniform_noise_decode_to_tokens_that_may_be_emitted():
    for kind in ("hybrid", "uniform"):
        lm = tiny(kind=kind)
        out = mj.sample(
            lm, PROMPTS[0], max_tokens=12, sampler=mj.rules.entropy_bound(0.5), plan=mj.Plan(steps=4)
        )
        assert not np.isin(out.tokens[0], [lm.tokenizer.mask, lm.tokenizer.pad]).any()
        assert out.forwards[0] <= 8


@rule
def by_turns(key, view, memory, *, slow=0.0):
    """Every other block of 8 in one pass; the blocks between token by token."""
    one = view.masked & (jnp.cumsum(view.masked) == 1)
    return accept(view, jnp.where((view.position // 8) % 2 == slow, one, view.masked)), memory


def test_rows_move_on_without_waiting_for_the_slowest_block():
    lm = tiny()
    run = lambda prompts, slow: mj.sample(
        lm, prompts, max_tokens=32, sampler=by_turns(np.asarray(slow)), logit_bias={lm.tokenizer.eos: -1e4}
    )
    both = run([PROMPTS[0], PROMPTS[0]], [0.0, 1.0])
    alone = [run([PROMPTS[0], PROMPTS[0]], [s, s]).passes for s in (0.0, 1.0)]
    # Two slow blocks of 8 passes and two of 1 each, and the encoding of prompt and of three blocks.
    assert both.forwards.tolist() == [18, 18] and alone == [22, 22]
    assert both.passes == max(alone)
