"""Laws of drafting by lookup: what it drafts, and that the text is the verifier's."""

# pyright: reportOptionalMemberAccess=false

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.methods.acceptance import look_up_row
from mercury_jax.models.drafter import join
from tests.decode.test_block_drafter import FEW, asked, check_same, drafter, prompts, verifier
from tests.tiny import tiny


def expected(text, size, ngram):
    """The continuation of the latest of the longest matches, by search."""
    for n in range(ngram, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the match ends before `end`
            if text[end - n : end] == text[-n:] and len(text) >= n:
                follows = text[end:]
                return [follows[k % len(follows)] for k in range(size)]
    return None


@pytest.mark.parametrize("ids", [2, 5, 40])
def test_the_draft_is_what_followed_the_longest_match(ids):
    rng, search = np.random.default_rng(ids), jax.jit(look_up_row, static_argnums=(0, 1))
    found_any = 0
    for _ in range(100):
        length = rng.integers(1, 24)
        text = rng.integers(0, ids, length).tolist()
        padded = np.concatenate(
            [text, rng.integers(0, ids, 24 - length)]
        )  # what is behind the text is not read
        draft, found = search(5, 3, padded, length - 1)
        want = expected(text, 5, 3)
        assert (found > 0) == (want is not None), text
        if want is not None:
            assert draft.tolist() == want, text
        found_any += int(found > 0)
    assert 0 < found_any


def test_text_is_the_verifiers():
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), prompts(), **asked())
        out = mj.sample(verifier(), prompts(), draft="lookup", **asked())
    check_same(plain, out)
    assert set(out.finish) == {"stop", "length"}
    assert 0 < out.draft.accepted.sum() <= out.draft.proposed.sum()
    assert out.forwards.sum() < plain.forwards.sum() and (out.draft.forwards <= out.forwards).all()


def test_a_loop_is_drafted_whole():
    """An answer of one token again and again: each pass commits a block of 8, as soon as it has occurred twice."""
    only = dict.fromkeys([300], 100.0)
    out = mj.sample(
        verifier("float32"), [5, 6, 7], max_tokens=26, temperature=0.0, logit_bias=only, draft="lookup"
    )
    assert out.tokens[0].tolist() == [300] * 26
    assert out.forwards[0] == 2 + 3  # 2 tokens one by one, 24 in blocks


def test_a_block_drafter_looks_up_what_the_text_repeats():
    """A drafter that cannot draft the one token of the answer is never accepted; with `lookup`, whole blocks are."""
    own = drafter(dtype="float32", ids=(301, 302))
    how = dict(max_tokens=26, temperature=0.0, logit_bias=dict.fromkeys([300], 100.0))
    outs = []
    for ngram in (0, 2):
        config = dataclasses.replace(own.config, lookup=ngram)
        draft = dataclasses.replace(own, config=config, join=functools.partial(join, config))
        outs.append(mj.sample(verifier("float32"), [5, 6, 7], draft=draft, **how))
    assert outs[0].tokens[0].tolist() == outs[1].tokens[0].tolist() == [300] * 26
    assert outs[0].forwards[0] == 26 and outs[0].draft.accepted[0] == 0
    # Three tokens one by one, so that a pair of them has occurred before, then a block of 6 a pass.
    assert outs[1].forwards[0] == 3 + 4


@pytest.mark.long
def test_a_stream_drafts_and_what_cannot_is_refused_by_name():
    joined = mj.with_block_drafter(verifier("float32"), "lookup")
    how = dict(max_tokens=12, logit_bias=FEW)
    plain, out = (list(mj.stream(lm, prompts(1)[0], **how))[-1] for lm in (verifier("float32"), joined))
    assert plain.tokens.tolist() == out.tokens.tolist()
    with pytest.raises(ValueError, match="lm is 'tiny.*autoregressive"):
        mj.with_block_drafter(tiny(), "lookup")
    with pytest.raises(ValueError, match="method is 'rejection'.*same_seed"):
        mj.load_drafter("lookup", method="rejection")
    with pytest.raises(ValueError, match="drafter is 'no_such'.*lookup"):
        mj.sample(verifier("float32"), "x", draft="no_such")
