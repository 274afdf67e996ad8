"""Rules with memory: cases computed by hand, and the references' decodings of the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode.rules import history
from tests.decode.rule_checks import check_follows, check_settles, check_traces, follow, goldens
from tests.decode.views import KEY, MASK, taken, view, view_of

M = MASK


def rows(*tops):
    """Logits [8, 10] with the given first entries of the first rows and next to nothing elsewhere."""
    return np.asarray([[*top, *[-30.0] * (10 - len(top))] for top in [*tops, *[[0.0]] * (8 - len(tops))]])


def read(logits, canvas, step=0, steps=9):
    canvas = jnp.asarray([*canvas, *[5] * (8 - len(canvas))])
    editable = canvas != 5
    v = view_of(logits, canvas, canvas == M, step=jnp.asarray(step), steps=jnp.asarray(steps))
    return v._replace(editable=editable)


def start(rule):
    return rule.init(jnp.full(8, M), 10)


@pytest.mark.long
def test_credit_remembers_what_came_first():
    rule = history.credit()
    earned, memory = 0.0, start(rule)
    for p in (0.6, 0.7):
        logits = rows(np.log([p, 1 - p]), [9.0])  # the second position is surer and gets settled
        proposal, memory = rule(KEY, read(logits, [M, M]), memory)
        assert proposal.canvas.tolist()[:2] == [M, 0]
        earned = 0.8 * earned + p**0.2
    np.testing.assert_allclose(memory[0, :2], [earned, 0.0], rtol=1e-5)
    # Now the other token is first by 0.1: its one credit does not outweigh the two of the first.
    logits = rows([2.0, 2.1])
    after = 0.8 * earned, (1 / (1 + np.exp(-0.1))) ** 0.2
    assert 2.0 + 0.7 * np.log1p(after[0]) > 2.1 + 0.7 * np.log1p(after[1])
    proposal, last = rule(KEY, read(logits, [M]), memory)
    np.testing.assert_allclose(last[0, :2], after, rtol=1e-5)
    assert proposal.canvas[0] == 0 and proposal.answer[0] == 0
    assert taken(history.credit(weight=0.0), read(logits, [M]), memory)[0] == 1


def test_credit_holds_the_threshold_against_the_fused_probability():
    logits = rows([2.0, 0.0], [2.5, 0.0])  # p = 0.881, 0.924
    memory = jnp.zeros((8, 10)).at[0, 0].set(1.0)
    fused = lambda top, c: 1 / (1 + np.exp(-(top + 0.7 * np.log1p(c))))
    first, second = fused(2.0, 0.8 + 0.881**0.2), fused(2.5, 0.924**0.2)
    assert 0.924 < first < second
    v = read(logits, [M, M])
    assert taken(history.credit((first + second) / 2), v, memory)[:2] == [M, 0]
    assert taken(history.credit(first - 1e-3), v, memory)[:2] == [0, 0]
    assert taken(history.credit(0.9999), v, memory)[:2] == [M, 0]
    tied = read(rows([2.0, 0.0], [2.0 + 1e-5, 0.0], [2.1, 0.0]), [M, M, M])  # p differs by 1e-6, and by 1e-2
    two = tied._replace(masked=tied.masked.at[2].set(False))
    assert taken(history.credit(0.9999), two, start(history.credit()))[:2] == [0, 0]
    assert taken(history.credit(0.9999), tied, start(history.credit()))[:2] == [M, M]


def test_credit_lets_a_draw_stand_that_is_not_the_argmax():
    v = read(rows([3.0, 2.9]), [M])
    v = v._replace(stats=v.stats._replace(sample=v.stats.sample.at[0].set(1)))
    assert taken(history.credit(), v, start(history.credit()))[0] == 1


def test_credit_is_given_to_masks_alone():
    _, memory = history.credit()(KEY, read(rows([3.0], [3.0]), [M, 4]), start(history.credit()))
    assert float(memory[0].sum()) > 0.9 and float(memory[1].sum()) == 0.0


def test_klass_waits_until_a_distribution_holds_still():
    rule = history.klass()
    memory, seen = start(rule), []
    for step in range(3):
        # The third position is sure, but of another token in every pass; the others are unsure.
        third = [6.0 if i == step else 0.0 for i in range(3)]
        logits = rows([9.0], [7.5 + 0.01 * step], third, [1.0, 0.0], [1.1, 0.0])
        proposal, memory = rule(KEY, read(logits, [M] * 5, step, 5), memory)
        seen.append(np.flatnonzero(proposal.canvas[:5] != M).tolist())
    # Twice nothing is known to be still, so the schedule's one of five; then both that are.
    assert seen == [[0], [0], [0, 1]]
    assert memory.stable.tolist()[:5] == [2, 2, 0, 2, 2]


def test_klass_measures_from_now_to_before():
    # KL(0.99 || 0.96) = 0.0166 and KL(0.96 || 0.99) = 0.0259, on either side of 0.02.
    log = lambda p: np.log([p, 1 - p])
    rule = history.klass(0.9, 0.02, 1)
    _, memory = rule(KEY, read(rows(log(0.96), log(0.99)), [M, M]), start(rule))
    _, memory = rule(KEY, read(rows(log(0.99), log(0.96)), [M, M], 1), memory)
    assert memory.stable.tolist()[:2] == [1, 0]


def run(rule, passes):
    """What each pass settles of 8 masks, given every pass's confidences; and the memory at the end."""
    memory, open_, settled = start(rule), np.full(8, True), []
    for p in passes:
        proposal, memory = rule(KEY, view(p, open_), memory)
        fresh = open_ & (np.asarray(proposal.canvas) != M)
        settled.append(np.flatnonzero(fresh).tolist())
        open_ = open_ & ~fresh
    return settled, memory


def test_slow_fast_explores_then_fills_its_span_and_goes_on_behind_it():
    passes = [
        [0.95, 0.5, 0.5, 0.2, 0.4, 0.1, 0.1, 0.1],  # sees as far as the fifth; settles what is sure
        [0.95, 0.5, 0.5, 0.2, 0.4, 0.1, 0.1, 0.1],  # sees as far again: the span is the first five
        [0.00, 0.0, 0.91, 0.92, 0.4, 0.99, 0.1, 0.1],  # fills: the sixth is sure but outside
        [0.00, 0.0, 0.0, 0.0, 0.4, 0.99, 0.1, 0.1],
        [0.00, 0.0, 0.0, 0.0, 0.0, 0.5, 0.6, 0.1],  # explores from the sixth on
    ]
    settled, memory = run(history.slow_fast(), passes)
    assert settled == [[0], [1], [2, 3], [4], [6]]
    assert (int(memory.start), int(memory.guess), bool(memory.filling)) == (5, 7, False)
    settled, memory = run(history.slow_fast(least=3), passes[:4])  # explores once more, with the same span
    assert settled == [[0], [1], [2, 3, 5], [4]] and int(memory.end) == 5


def test_slow_fast_begins_at_the_first_mask():
    rule = history.slow_fast()
    _, memory = rule(
        KEY, view([0.1] * 8, [False] * 3 + [True] * 5), start(rule)
    )  # nothing is sure: the first alone
    assert (int(memory.start), int(memory.guess)) == (3, 4)


def test_slow_fast_settles_for_the_mean_when_its_guesses_do_not_agree():
    rule, memory = history.slow_fast(most=3), start(history.slow_fast())
    for far in (7, 3, 6):
        p = [0.5 if i == far else 0.1 for i in range(8)]
        _, memory = rule(KEY, view(p, [True] * 8), memory)
    assert int(memory.end) == (4 + 7) // 2 and bool(memory.filling)
    wide = history.slow_fast(spread=1.6, most=9)  # guesses 8 and 4 deviate by 2, 4 and 7 by 1.5
    memory = start(wide)
    for far, ends in ((7, False), (3, False), (6, True)):
        p = [0.5 if i == far else 0.1 for i in range(8)]
        _, memory = wide(KEY, view(p, [True] * 8), memory)
        assert bool(memory.filling) is ends
    assert int(memory.end) == 7


def test_prophet_commits_all_when_the_lead_is_large_for_its_third():
    logits = rows([8.0, 1.0], [4.0, 1.0], [9.0, 9.0])  # leads 7, 3, and of a settled position
    v = lambda step, steps=6: read(logits, [M, M, 5], step, steps)
    left = lambda rule, step: sum(t == M for t in taken(rule, v(step)))
    rule = history.prophet(5.5, 4.5, 4.0)  # the mean lead is 5
    assert [left(rule, i) for i in range(6)] == [1, 0, 0, 0, 0, 0]  # 1/6 is early, 2/6 is not
    assert left(history.prophet(5.5, 5.5, 4.0), 3) == 1 and left(history.prophet(5.5, 5.5, 4.0), 4) == 0
    assert left(history.prophet(5.0, 9.0, 9.0), 0) == 0  # reaching it is enough
    assert taken(history.prophet(9.0, 9.0, 9.0), v(0))[:3] == [0, M, 5]


@pytest.mark.long
@pytest.mark.parametrize(
    "name, rule, steps",
    [
        ("credit", history.credit(0.8), 20),
        ("klass", history.klass(0.7, 0.1), 8),
        ("slow_fast", history.slow_fast(0.8, 0.5, least=3, most=3), 20),
    ],
)
def test_they_decode_as_their_references_do(name, rule, steps):
    check_follows(rule, name, steps)


def test_prophet_decodes_as_its_reference_does():
    kept, early = goldens(), 0
    for logits, theirs in zip(kept["prophet_logits"], kept["prophet"], strict=True):
        for ours, reference, before in follow(history.prophet(), logits, theirs, 5):
            assert ours == reference
            early += before.count(11) - reference.count(11) > 1
    assert early == 4


RULES = [
    (history.credit(0.6), 5), (history.klass(0.6), 5), (history.slow_fast(0.6, least=1, most=2), 5),
    (history.prophet(), 3), (history.prophet(3.0, 2.0, 1.0), 5),
]  # fmt: skip


@pytest.mark.parametrize("rule, steps", RULES, ids=lambda x: getattr(x, "name", None))
def test_they_settle_every_mask_and_touch_nothing_else(rule, steps):
    check_settles(rule, steps)
    check_traces(rule)
