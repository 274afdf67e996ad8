"""Dream's rules: its schedule and its draw of positions by hand, and its own decoding of the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode.rules import masked as dream
from tests.decode.rule_checks import check_follows, check_settles, check_traces, small
from tests.decode.views import KEY, MASK, taken, view, view_of

M = MASK


def at(v, step, steps):
    return v._replace(step=jnp.asarray(step), steps=jnp.asarray(steps))


def test_the_share_is_rounded_down_until_the_last_step_takes_all():
    v = small([0.1, 0.9, 0.5, 0.99, 0.3, 0.2, 0.6, 0.4])
    count = lambda rule, step: sum(t != M for t in taken(rule, at(v, step, 4)))
    # 1 - s/t on linspace(1, 0, 5): 1/4, 1/3, 1/2, 1 of 8 masks.
    assert [count(dream.maskgit_plus(eps=0.0), i) for i in range(4)] == [2, 2, 4, 8]
    # On linspace(1, 0.001, 5): 0.24975, 0.3329, 0.4990, then all.
    assert [count(dream.maskgit_plus(), i) for i in range(4)] == [1, 2, 3, 8]
    assert taken(dream.maskgit_plus(), at(v, 2, 4)) == [M, 1, M, 3, M, M, 6, M]
    # With as many steps as tokens the first step's share is just under one token.
    assert count(dream.maskgit_plus(), 0) == 1 and taken(dream.maskgit_plus(), at(v, 0, 8)) == [M] * 8


def test_each_rule_looks_at_its_own_score():
    # 0: the most probable token. 1: the largest margin. 2: the least entropy (two equal tokens).
    p = np.full((8, 10), 1e-9)
    p[0, :3], p[1, :9], p[2, :2] = [0.52, 0.47, 0.01], [0.49] + [0.51 / 8] * 8, [0.501, 0.499]
    v = at(view_of(np.log(p), [M] * 3 + [1] * 5, [True] * 3 + [False] * 5), 1, 4)
    first = lambda rule: [t != M for t in taken(rule, v)[:3]]  # a third of three masks: one
    assert first(dream.maskgit_plus(eps=0.0)) == [True, False, False]
    assert first(dream.topk_margin(eps=0.0)) == [False, True, False]
    assert first(dream.dream_entropy(eps=0.0)) == [False, False, True]


def test_origin_moves_each_mask_alone():
    n = 4000
    v = view([0.5] * n, [True] * n)
    v = v._replace(stats=v.stats._replace(sample=jnp.zeros(n, int)))
    share = np.mean(np.asarray(taken(dream.dream_origin(eps=0.0), at(v, 1, 4))) == 0)
    assert abs(share - 1 / 3) < 4 * np.sqrt(2 / 9 / n)
    assert taken(dream.dream_origin(), at(v, 3, 4)) == [0] * n
    early = np.mean(np.asarray(taken(dream.dream_origin(eps=0.2), at(v, 0, 4))) == 0)
    assert abs(early - 0.2) < 4 * np.sqrt(0.16 / n)


def test_alg_temp_draws_positions_without_replacement():
    scores, temp, n = np.asarray([0.2, 0.9, 0.5, 0.4]), 0.4, 20000
    p = np.exp(scores / temp) / np.exp(scores / temp).sum()
    v = at(small(scores), 0, 2)  # half of 4 masks: 2 positions
    rule = dream.maskgit_plus(temp, 0.0)
    draw = jax.jit(jax.vmap(lambda key: rule(key, v, ())[0].canvas != M))
    drawn = np.asarray(draw(jax.random.split(KEY, n)))[:, :4]
    assert (drawn.sum(1) == 2).all()
    for i in range(4):
        for j in range(i):
            want = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
            have = (drawn[:, i] & drawn[:, j]).mean()
            assert abs(have - want) < 4 * np.sqrt(want * (1 - want) / n)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, rule",
    [
        ("maskgit_plus", dream.maskgit_plus()),
        ("topk_margin", dream.topk_margin()),
        ("entropy", dream.dream_entropy()),
    ],
)
def test_they_decode_as_dream_does(name, rule):
    check_follows(rule, name, 10)


RULES = [dream.dream_origin(), dream.maskgit_plus(), dream.topk_margin(0.2), dream.dream_entropy(0.2)]


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda x: x.name)
def test_they_settle_every_mask_and_touch_nothing_else(rule):
    check_settles(rule, 3)
    check_traces(rule)
