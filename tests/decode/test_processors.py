"""Shapers against cases computed by hand, and the laws of every chain of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import processors
from mercury_jax.decode.sampler import broadcast_params
from mercury_jax.decode.token_stats import NEVER
from tests.decode.views import MASK, view
from tests.tiny import tiny

V = 10
run = jax.jit(lambda part, logits, v: part(logits, v))
many = jax.jit(jax.vmap(lambda part, logits, v: part(logits, v)))
kept = lambda logits: (np.asarray(logits) > NEVER).tolist()


def some(canvas, masked, **more):
    """A view of a canvas as it stands, every position editable."""
    masked = jnp.asarray(masked)
    canvas = jnp.asarray(canvas)
    arrays = {k: jnp.asarray(v) for k, v in more.items()}
    return view([0.0] * len(canvas), masked, **(dict(canvas=canvas, editable=jnp.ones_like(masked)) | arrays))


def counted(*ids):
    return jnp.zeros(V, int).at[jnp.asarray(ids, int)].add(1)


def test_truncation_keeps_what_it_should():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    any_view = view([1], [True])
    left = lambda part: kept(run(part, logits, any_view))[0]
    assert left(processors.top_k(2)) == [True, True, False, False]
    assert left(processors.top_p(0.7)) == [True, True, False, False]
    assert left(processors.top_p(0.81)) == [True, True, True, False]
    assert left(processors.top_p(0.0)) == [True, False, False, False]
    assert left(processors.top_p(0.7, crossing=0)) == [True, False, False, False]
    assert left(processors.top_p(0.81, crossing=0)) == [True, True, False, False]
    assert left(processors.top_p(0.0, crossing=0)) == [True, False, False, False]
    assert left(processors.min_p(0.2)) == [True, True, True, False]
    assert left(processors.min_p(1.0)) == [True, False, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_truncation_keeps_what_sorting_keeps(seed):
    """Among equal and forbidden logits, of both signs, and at the edges of k and p."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=10.0 ** rng.integers(-1, 3), size=(16, 40)).astype(np.float32)
    logits[::2] = logits[::2].round()
    logits[:, rng.integers(0, 40, 5)] = NEVER
    ordered = -np.sort(-logits, axis=1)
    mass = np.asarray(jax.nn.softmax(jnp.asarray(ordered)))
    any_view = view([1], [True])
    truncated = lambda part: np.asarray(run(part, jnp.asarray(logits), any_view))
    cut = lambda least: np.where(logits >= least, logits, np.float32(NEVER))
    for k in (1, 2, 7, 39, 40, 99):
        np.testing.assert_array_equal(truncated(processors.top_k(k)), cut(ordered[:, min(k, 40) - 1, None]))
    for p in (0.0, 0.2, 0.7, 0.95):
        for crossing in (0, 1):
            before = mass.cumsum(1) - crossing * mass
            needed = (before < p) if crossing else (before <= p)
            needed[:, 0] = True
            least = np.where(needed, ordered, np.inf).min(1, keepdims=True)
            np.testing.assert_array_equal(truncated(processors.top_p(p, crossing)), cut(least))
    np.testing.assert_array_equal(truncated(processors.top_p(1.0)), logits)
    grad = jax.grad(lambda x: jnp.tanh(run(processors.top_k(2), x, any_view)[0]).sum())(
        jnp.asarray([[0.1, 0.3, 0.2]])
    )
    assert (np.asarray(grad) > 0).tolist() == [[False, True, True]]


def test_temperature_divides_and_cooling_follows_time():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    np.testing.assert_allclose(run(processors.temperature(2.0), logits, view([1], [True])), logits / 2)
    for t, want in ((0.0, 0.4), (0.5, 0.6), (1.0, 0.8)):
        cold = run(processors.cooling(0.4, 0.8), logits, view([1], [True], t=jnp.asarray(t)))
        np.testing.assert_allclose(cold, logits / want, rtol=1e-6)


def test_repetition_divides_what_is_positive_and_multiplies_the_rest():
    logits = jnp.tile(jnp.asarray([2.0, 2.0, -2.0, -2.0, 3.0] + [1.0] * 5), (2, 1))
    v = some([MASK, MASK], [True, True], prompt_counts=counted(0), output_counts=counted(2, 4))
    got = run(processors.repetition(2.0), logits, v)
    np.testing.assert_allclose(got, [[1.0, 2.0, -4.0, -2.0, 1.5] + [1.0] * 5] * 2)
    np.testing.assert_array_equal(run(processors.repetition(), logits, v), logits)


def test_presence_and_frequency_count_the_answer_only():
    logits = jnp.zeros((1, V))
    v = some([MASK], [True], prompt_counts=counted(0, 1), output_counts=counted(1, 1, 2))
    assert run(processors.presence(0.5), logits, v)[0, :4].tolist() == [0, -0.5, -0.5, 0]
    assert run(processors.frequency(0.5), logits, v)[0, :4].tolist() == [0, -1.0, -0.5, 0]


def drop(v):
    """What a penalty of 1 a time subtracts, as {id: times} of each position."""
    fell = -np.asarray(run(processors.frequency(1.0), jnp.zeros((len(v.canvas), V)), v))
    return [{i: int(n) for i, n in enumerate(row) if n} for row in fell]


def test_settled_tokens_count_everywhere_but_at_their_own_place():
    v = some(
        [5, MASK, 5, 6], [False, True, False, False], output_counts=counted(6), step=1, answer=[5, 5, 5, 6]
    )
    assert drop(v) == [{5: 1, 6: 2}, {5: 2, 6: 2}, {5: 1, 6: 2}, {5: 2, 6: 1}]
    # What the user gave, and what lies beyond the active block, is not the answer's.
    fixed = v._replace(editable=jnp.asarray([True, True, False, True]))
    assert drop(fixed)[1] == {5: 1, 6: 2}


def test_uniform_noise_counts_the_last_answer_from_left_to_right():
    v = some([1, 2, 3], [True] * 3, answer=[5, 5, 6], step=1, uniform=True)
    assert drop(v) == [{}, {5: 1}, {5: 2}]
    assert drop(v._replace(step=jnp.asarray(0))) == [{}, {}, {}]


def test_a_draft_that_is_checked_counts_from_left_to_right():
    v = some([5, 5, 6], [False] * 3, t=0.0, output_counts=counted(6))
    assert drop(v) == [{6: 1}, {5: 1, 6: 1}, {5: 2, 6: 1}]


def test_the_end_of_text_is_no_part_of_the_answer():
    v = some([MASK, 3, 3], [True, False, False], eos=3)
    assert drop(v)[0] == {}
    assert drop(some([MASK, 3, 3], [True, False, False]))[0] == {3: 2}


def test_bias_adds_and_ban_forbids():
    logits = jnp.zeros((2, V))
    v = some([MASK] * 2, [True] * 2)
    assert run(processors.bias({3: 1.5, 9: -2, 0: 4}), logits, v)[1].tolist() == [
        4,
        0,
        0,
        1.5,
        0,
        0,
        0,
        0,
        0,
        -2,
    ]
    assert run(processors.bias({}), logits, v).tolist() == logits.tolist()
    assert [i for i, ok in enumerate(kept(run(processors.ban([0, 9]), logits, v))[0]) if not ok] == [0, 9]
    assert kept(run(processors.ban([]), logits, v)) == [[True] * V] * 2


def rowwise(part, logits, views):
    """The logits processor as the decoder runs it: vmapped over rows, each with its own parameters."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *views)
    return many(broadcast_params(part, len(views)), logits, stacked)


def test_rows_have_tables_of_their_own():
    v = some([MASK] * 2, [True] * 2)
    logits = jnp.zeros((3, 2, V))
    first = lambda part: np.asarray(rowwise(part, logits, [v] * 3))[:, 0]
    got = first(processors.bias([{1: 1.0}, None, {2: 2.0, 1: 3.0, 0: 1.0}]))
    assert got[:, :3].tolist() == [[0, 1, 0], [0, 0, 0], [1, 3, 2]]
    assert [np.flatnonzero(row == NEVER).tolist() for row in first(processors.ban([[1, 2], None, [5]]))] == [
        [1, 2],
        [],
        [5],
    ]
    assert [
        np.flatnonzero(row == 0).tolist() for row in first(processors.allow([{0: [4]}, {}, {0: [1, 7]}]))
    ] == [
        [4],
        list(range(V)),
        [1, 7],
    ]
    np.testing.assert_array_equal(first(processors.bias({1: 1.0}))[:, 1], [1, 1, 1])
    fell = rowwise(
        processors.presence(np.array([0.0, 1.0, 2.0])), logits, [v._replace(output_counts=counted(4))] * 3
    )
    assert fell[:, 1, 4].tolist() == [0, -1, -2]


def test_allow_rules_the_positions_it_names_wherever_the_window_stands():
    part = processors.allow({0: [1, 2], 2: [3], 7: [4]})
    may = lambda at: [
        np.flatnonzero(row).tolist()
        for row in kept(run(part, jnp.zeros((3, V)), some([MASK] * 3, [True] * 3, position=at)))
    ]
    free = list(range(V))
    assert may(0) == [[1, 2], free, [3]]
    assert may(2) == [[3], free, free]
    assert may(5) == [free, free, [4]]
    assert may(-2) == [free, free, [1, 2]]  # the window begins inside of the prompt


def bits_of(*rows):
    """Packed rows for 70 ids: three words."""
    may = np.zeros((len(rows), 96), np.uint8)
    for row, ids in zip(may, rows, strict=True):
        row[list(ids)] = 1
    return np.packbits(may, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("kind", [np.uint32, np.int32])
def test_allow_bits_reads_bit_v_of_each_word(kind):
    bits = bits_of([0, 31, 32, 69], [5]).view(kind)
    logits = jnp.zeros((4, 70))
    v = some([MASK] * 4, [True] * 4, position=2)
    found = lambda part: [np.flatnonzero(row).tolist() for row in kept(run(part, logits, v))]
    free = list(range(70))
    assert found(processors.allow_bits(bits, 3)) == [free, [0, 31, 32, 69], [5], free]
    assert found(processors.allow_bits(bits, 1)) == [[5], free, free, free]


def test_allow_bits_takes_rows_and_starts_of_their_own():
    bits = np.stack([bits_of([1]), bits_of([2])])
    v = some([MASK] * 2, [True] * 2)
    got = rowwise(processors.allow_bits(bits, np.array([0, 1])), jnp.zeros((2, 2, 70)), [v] * 2)
    counts = np.asarray(got > NEVER).sum(-1).tolist()
    assert counts == [[1, 70], [70, 1]] and bool(got[0, 0, 1] == 0) and bool(got[1, 1, 2] == 0)


def test_another_table_of_the_same_padded_size_compiles_nothing():
    chain = jax.jit(lambda parts, logits, v: functools.reduce(lambda l, part: part(l, v), parts, logits))
    v, logits = some([MASK] * 2, [True] * 2), jnp.zeros((2, V))
    for table, names, words in (
        ({1: 2.0, 4: 3.0, 5: 0.5}, [1], {0: [1, 2], 1: [3]}),
        ({7: 1.0, 2: 0.0, 3: 1.0, 0: 5.0}, [8], {5: [1, 2, 3]}),
    ):
        chain((processors.bias(table), processors.ban(names), processors.allow(words)), logits, v)
    assert chain._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


CHAIN = [
    processors.temperature(1e-6),
    processors.temperature(1e-6),
    processors.cooling(1e-6, 1e-6),
    processors.temperature(1e30),
    processors.repetition(1e6),
    processors.repetition(1e-6),
    processors.presence(-1e38),
    processors.frequency(-1e38),
    processors.bias({2: 3e38, 4: 3e38}),
    processors.top_k(3),
    processors.top_p(1.0),
    processors.min_p(1e-9),
    processors.ban([1]),
    processors.allow({0: [2, 5]}),
]


def test_what_is_forbidden_stays_forbidden_and_finite_after_any_chain():
    v = some([MASK, 6], [True, False], prompt_counts=counted(2, 5), output_counts=counted(2, 2), t=1.0)
    start = jnp.linspace(-3.0, 3.0, 2 * V).reshape(2, V).at[:, 2].set(NEVER)
    for order in (CHAIN, CHAIN[::-1], *(list(np.random.default_rng(s).permutation(CHAIN)) for s in range(3))):
        logits = start
        for part in order:
            logits = run(part, logits, v)
            assert np.isfinite(logits).all() and (np.asarray(logits)[:, 2] == np.float32(NEVER)).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: processors.bias({-1: 1.0}), "logit_bias id is -1"),
        (lambda: processors.bias({1.5: 1.0}), "logit_bias id is 1.5"),
        (lambda: processors.bias({True: 1.0}), "logit_bias id is True"),
        (lambda: processors.bias({"7": 1.0}), "logit_bias id is '7'"),
        (lambda: processors.bias({7: float("inf")}), r"logit_bias\[7\] is inf; allowed: a finite number"),
        (lambda: processors.bias({7: None}), r"logit_bias\[7\] is None"),
        (lambda: processors.bias([{1: 1.0}, 3]), r"logit_bias\[1\] is 3"),
        (lambda: processors.bias([]), "logit_bias is"),
        (lambda: processors.ban(3), "ban is 3"),
        (lambda: processors.ban([[1], 3]), "ban is 3"),
        (lambda: processors.ban([2**40]), "ban id is 1099511627776"),
        (lambda: processors.allow({0: []}), r"allow\[0\] is \[\]; allowed: a list of at least one id"),
        (lambda: processors.allow({0: 3}), r"allow\[0\] is 3"),
        (lambda: processors.allow({-1: [3]}), "allow position is -1"),
        (lambda: processors.allow_bits(np.ones((2, 3))), "allow_bits bits is"),
        (lambda: processors.allow_bits(np.ones((2, 3), np.uint32), 0.5), "allow_bits start is 0.5"),
        (
            lambda: processors.check_ids(processors.bias([{1: 1.0}, {10: 1.0}]), V),
            r"logit_bias is 10; allowed: ids in 0\.\.9",
        ),
        (lambda: processors.check_ids(processors.ban([11]), V), "ban is 11"),
        (lambda: processors.check_ids(processors.allow({3: [12]}), V), "allow is 12"),
        (
            lambda: processors.check_ids(processors.allow_bits(np.ones((2, 3), np.uint32)), V),
            "allow_bits words is 3; allowed: 1",
        ),
    ],
)
def test_wrong_tables_are_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_tables_within_the_vocabulary_pass_the_check():
    for part in (
        processors.bias({9: 1.0}),
        processors.ban([]),
        processors.allow({99: [9]}),
        processors.top_k(99),
    ):
        processors.check_ids(part, V)


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("pattern", "kind", "rule"),
    [
        ("causal_encoder", "uniform", mj.rules.entropy_bound(2.0)),
        ("block_causal", "absorbing", mj.rules.threshold(0.3)),
        ("bidirectional", "absorbing", mj.rules.klass(0.3)),
        ("bidirectional", "hybrid", mj.rules.self_correct(0.3, t=0.0)),
    ],
)
def test_the_confidence_of_a_rule_is_that_before_the_truncation(pattern, kind, rule):
    """One token is left to draw, and yet no more tokens are accepted in a pass."""
    lm, one = tiny(pattern, kind=kind), (processors.top_k(1), processors.top_p(0.1), processors.min_p(1.0))
    sample = lambda chain, t: mj.sample(
        lm, ["def x", "y"], max_tokens=16, sampler=mj.Sampler(rule, chain, temperature=t)
    )
    plain, cut = sample((), 0.0), sample(one, 1.0)
    assert [t.tolist() for t in cut.tokens] == [t.tolist() for t in plain.tokens]
    assert cut.forwards.tolist() == plain.forwards.tolist()
    if rule.name == "threshold":
        after = sample(tuple(map(processors.before_confidence, one)), 0.0)
        assert after.forwards.max() < plain.forwards.min()  # every token has probability 1
