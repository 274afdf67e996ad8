"""Rules that look at where a mask stands, `frechet` and `entropy_threshold`: the references' outputs, the papers'
formulas by hand, and what a user calls them with."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.rules import masked, position, uniform
from tests.decode.rule_checks import check_settles, check_traces, follow, goldens, small, takes
from tests.decode.views import KEY, MASK, view
from tests.tiny import tiny

M = MASK


@functools.cache
def kept():
    with np.load(Path(__file__).parent / "goldens" / "positions.npz") as file:
        return dict(file)


REFERENCES = {
    "entropy_threshold": (masked.entropy_threshold(0.5), 20),
    "frechet": (masked.frechet(0.25), 20),
    "entropy_bound": (uniform.entropy_bound(0.6), 20),
    "pc_sampler": (lambda: position.pc_sampler(kept()["frequencies"], 0.25, 1.0), 8),
    "adablock": (position.adablock(0.7, [2, 5], delimiter_p=0.3, length=6), 20),
}


@pytest.mark.long
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", REFERENCES)
def test_they_decode_as_their_references_do(name):
    rule, steps = REFERENCES[name]
    rule = rule() if callable(rule) and not hasattr(rule, "params") else rule
    for logits, theirs in zip(goldens()["logits"], kept()[name], strict=True):
        passes = list(follow(rule, logits, theirs, steps))
        assert len(passes) > 6
        for step, (ours, reference, _) in enumerate(passes):
            assert ours == reference, f"step {step}"


# --- by hand


def test_frechet_is_factor_where_confidences_are_equal_and_more_elsewhere():
    # Scores at margin 0: 0.9 - 0.1; 1.6 - 1 - 0.3 = 0.3; 2.2 - 2 - 0.4 = -0.2. `factor(1)` wants 2/3 of the second.
    p = [0.6, 0.9, 0.7]
    assert takes(masked.frechet(0.0), p) == [M, 1, 2] == takes(masked.factor(1.0, 0), p)
    p = [0.6, 0.99, 0.99]  # 2.58 - 2 - 0.4 = 0.18: the third too, which `factor` refuses (1 - 1/4)
    assert takes(masked.frechet(0.0), p) == [0, 1, 2] and takes(masked.factor(1.0, 0), p) == [M, 1, 2]
    assert takes(masked.frechet(0.18 + 1e-3), p) == [M, 1, 2]
    assert takes(masked.frechet(), [0.2, 0.3, 0.1]) == [M, 1, M]
    for margin in (0.0, 0.25, 0.5):  # of 5 equal ones the largest n with (n + 1)(1 - c) < 1 - margin
        for c in (0.73, 0.81, 0.89, 0.94):
            fits = [n for n in range(1, 6) if (n + 1) * (1 - c) < 1 - margin]
            taken = 5 - takes(masked.frechet(margin), [c] * 5).count(M)
            assert taken == max([1, *fits])


def test_entropy_threshold_accepts_what_is_at_most_h():
    entropy = [0.5, 0.4, 0.7, 0.51, 9.0, 9.0, 9.0, 9.0]
    assert takes(masked.entropy_threshold(), [0.1] * 4, entropy=entropy) == [0, 1, M, M]
    assert takes(masked.entropy_threshold(0.1), [0.1] * 4, entropy=entropy) == [M, 1, M, M]


@pytest.mark.long
def test_pc_sampler_weighs_position_probability_and_frequency():
    # exp(-0.25 i) p -log f with f = 1/2 for id 0, 1/4 for 1, 1/8 for 2 and 3: 0.69 p, 1.08 p, 1.26 p, 0.98 p.
    counts = [4, 2, 1, 1, 0, 0, 0, 0, 0, 0]
    two = dict(editable=jnp.arange(8) < 4, steps=jnp.asarray(2))
    assert takes(position.pc_sampler(counts), [0.9, 0.5, 0.5, 0.5], **two) == [0, M, 2, M]
    assert takes(position.pc_sampler(counts, 0.0), [0.9, 0.5, 0.5, 0.5], **two) == [M, M, 2, 3]
    assert takes(position.pc_sampler(counts, clip=0.2), [0.9, 0.5, 0.5, 0.5], **two) == [0, 1, M, M]
    assert takes(position.pc_sampler(None, 0.0), [0.1, 0.5, 0.6, 0.5], **two) == [M, 1, 2, M]
    # Far positions keep their order, although exp(-0.25 * 440) is 0 in fp32.
    p, still = [0.1] * 448 + [0.4] * 2, [False] * 440 + [True] * 10
    far = view(p, still, editable=jnp.ones(450, bool), steps=jnp.asarray(450))
    assert jnp.flatnonzero(position.pc_sampler(None)(KEY, far, ())[0].canvas == 448).tolist() == []
    near = far._replace(stats=far.stats._replace(p_sample=jnp.asarray([*p[:441], 0.9, *p[442:]])))
    assert jnp.flatnonzero(position.pc_sampler(None)(KEY, near, ())[0].canvas == 441).tolist() == [441]


def test_adablock_ends_at_the_most_probable_delimiter_in_its_window():
    p = [0.95, 0.5, 0.6, 0.4, 0.95, 0.95, 0.95, 0.95]  # position i draws id i
    rule = functools.partial(position.adablock, length=4, window=0.5)  # looks at 4 of 8
    first = lambda **more: rule(**more)(KEY, small(p), jnp.asarray(0))
    ends = lambda **more: int(first(**more)[1])
    assert ends(delimiters=1) == 2 and ends(delimiters=[1, 2]) == 3  # of two the more probable
    assert ends(delimiters=[1, 6]) == 2  # 6 is out of the window
    assert ends(delimiters=3, delimiter_p=0.4) == 4 and ends(delimiters=1, delimiter_p=0.51) == 4
    assert first(delimiters=1)[0].canvas.tolist() == [0] + [M] * 7  # the block alone
    # A block that is not full keeps its end; a full one is followed by the next.
    half = small(p, [False, True, *[True] * 6])
    assert int(rule(delimiters=4)(KEY, half, jnp.asarray(3))[1]) == 3
    assert int(rule(delimiters=4)(KEY, half, jnp.asarray(1))[1]) == 5


def test_a_wavefront_grows_from_what_is_decided():
    p, memory = [0.2, 0.3, 0.9, 0.8, 0.9, 0.1, 0.1, 0.1], position.wavefront().init(jnp.zeros(8), 10)
    rule, four = position.wavefront(3, 1), dict(steps=jnp.asarray(8))
    proposal, memory = rule(KEY, small(p, **four), memory)
    assert proposal.canvas.tolist() == [M, M, 2, *[M] * 5]  # of the first three
    # Within 1 of the prompt or of position 2: 0, 1 and 3.
    assert np.flatnonzero(memory.front).tolist() == [0, 1, 3]
    left = small(p, [True, True, False, *[True] * 5], editable=jnp.ones(8, bool), **four)
    left = left._replace(step=jnp.asarray(1))
    proposal, memory = rule(KEY, left, memory)
    assert proposal.canvas.tolist() == [M, M, 8, 3, *[M] * 4]  # not 4, which is as sure but out of the front
    assert np.flatnonzero(memory.front).tolist() == [0, 1, 4]
    # Of five candidates within 2, the three that the pass was the most confident of.
    _, memory = position.wavefront(3, 2)(KEY, left, position.Wavefront(jnp.arange(8) == 0))
    assert np.flatnonzero(memory.front).tolist() == [1, 3, 4]


def test_dilated_halves_its_spacing():
    rule, p = position.dilated(), [0.5] * 8
    at = lambda step, masks, rule=rule, p=p: takes(rule, p, masks, step=jnp.asarray(step), editable=every)
    every = jnp.ones(8, bool)
    where = lambda canvas: [i for i, x in enumerate(canvas) if x not in (M, 8)]
    assert where(at(0, [True] * 8)) == [0, 4]
    assert where(at(1, [False, True, True, True] * 2)) == [2, 6]
    assert where(at(2, [False, True] * 4)) == [1, 3, 5, 7]
    # Base 3: floor(8 / 3) = 2, then all. Decided positions are left out, an empty round too.
    assert where(at(0, [True] * 8, position.dilated(3))) == [0, 2, 4, 6]
    assert where(at(0, [False, True, True, True] * 2)) == [2, 6]
    # What is uncertain waits, but in the last round for ever only while another is accepted.
    doubt = [0.2, 0.5, 0.5, 0.5, 0.9, 0.1, 0.5, 0.5]
    assert where(at(0, [True] * 8, position.dilated(low=0.3), doubt)) == [4]
    assert where(at(1, [True, True, True, True, False, True, True, True], position.dilated(low=0.3), doubt)) == [
        2, 6,
    ]  # fmt: skip
    assert where(at(3, [True, *[False] * 4, True, False, False], position.dilated(low=0.3), doubt)) == [0]


RULES = [
    (masked.entropy_threshold(0.3), 7), (masked.frechet(), 5), (position.pc_sampler(), 3),
    (position.pc_sampler(np.arange(10)), 5), (position.adablock(delimiters=2, length=2), 7), (position.wavefront(), 5),
    (position.wavefront(2, 1), 5), (position.dilated(), 5), (position.dilated(3, 0.5), 7),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("rule, steps", RULES, ids=lambda x: getattr(x, "name", None))
def test_they_settle_every_mask_and_touch_nothing_else(rule, steps):
    check_settles(rule, steps)


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=lambda x: x.name)
def test_the_machine_can_carry_them(rule):
    check_traces(rule)


# --- the public call


@pytest.mark.long
def test_a_dilated_block_takes_as_many_passes_as_its_logarithm():
    lm = tiny("bidirectional")
    sample = lambda block, tokens: mj.sample(
        lm, "def x", max_tokens=tokens, sampler=mj.rules.dilated(), plan=mj.Plan(block=block)
    )
    assert sample(16, 32).forwards.tolist() == [8] and sample(32, 32).forwards.tolist() == [5]


def test_tables_that_do_not_fit_are_refused():
    lm = tiny("bidirectional")
    vocab = lm.model.config.vocab
    run = lambda rule: mj.sample(lm, "def x", max_tokens=8, sampler=rule)
    assert len(run(mj.rules.pc_sampler(np.arange(vocab))).tokens[0]) <= 8
    with pytest.raises(ValueError, match=rf"pc_sampler\(counts=\) is 10; allowed: {vocab}"):
        run(mj.rules.pc_sampler(np.arange(10)))
    with pytest.raises(ValueError, match=rf"adablock\(delimiters=\) is {vocab}; allowed"):
        run(mj.rules.adablock(delimiters=[3, vocab]))
    for wrong in ("a", [-1.0, 2.0], np.zeros(4), [[1.0]], [np.nan, 1.0], []):
        with pytest.raises(ValueError, match=r"pc_sampler\(counts=\) is"):
            mj.rules.pc_sampler(wrong)
    for wrong in (-2, 2.5, [], [[1]], "x", [1, -2]):
        with pytest.raises(ValueError, match=r"adablock\(delimiters=\) is"):
            mj.rules.adablock(delimiters=wrong)
    with pytest.raises(ValueError, match=r"adablock\(length=\)"):
        mj.rules.adablock(length=0)
