"""A vocabulary that is read chunk by chunk says what it says as a whole, and is never all there."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.config import NoiseConfig
from mercury_jax.decode import chunked_vocab, processors
from mercury_jax.decode.chunked_vocab import ChunkedVocab
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.methods import guidance
from mercury_jax.decode.registration import logits_processor, rule
from mercury_jax.decode.request import Request, rows_of, start
from mercury_jax.decode.sampler import Sampler, accept
from mercury_jax.decode.token_stats import NEVER, draw, token_stats
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.types import LM
from tests.tiny import tiny

L, V = 6, 70
KEY = jax.random.key(0)
CUTS = ((0, 70), (0, 32, 64, 70), (0, 7, 14, 70))  # where pieces begin and end


def logits_of(key=KEY):
    """Some ids impossible, one position with two largest logits in different chunks."""
    x = 3 * jax.random.normal(key, (L, V))
    return x.at[:, 5].set(NEVER).at[2, jnp.asarray([3, 66])].set(9.0).at[3, 33].set(40.0)


@functools.partial(jax.jit, static_argnums=0)
def joined(cuts, logits, canvas, eos, uniforms, inside, temperature):
    """One row, as `chunked_vocab` reads it."""
    found = []
    for first, end in itertools.pairwise(cuts):
        part = logits[:, first:end]
        piece = jax.tree.map(lambda x: x[None], chunked_vocab.chunk_stats(first, part, canvas, eos))
        piece = chunked_vocab.draw_in_chunk(piece, part[None], inside[None], temperature[None], first)
        found.append(jax.tree.map(lambda x: x[0], piece))
    return chunked_vocab.merge_chunks(jax.tree.map(lambda *x: jnp.stack(x), *found), uniforms, temperature)


@pytest.mark.long
@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_read_what_the_whole_reads(cuts):
    logits, canvas, eos = logits_of(), jnp.asarray([5, 3, 66, 1, 69, 40]), jnp.asarray(64)
    half, cold = jnp.full(L, 0.5), jnp.asarray(0.0)
    got = joined(cuts, logits, canvas, eos, half, half, cold)
    want = token_stats(logits, canvas, draw(logits, half, cold), eos)
    for name, a, b in zip(want._fields, got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("cuts", [(0, 700), (0, 300, 700)])
def test_pieces_of_many_blocks_read_what_the_whole_reads(cuts):
    """Positions whose two largest logits are in one block of ids, in two blocks, and equal."""
    logits = jax.random.normal(KEY, (L, 700)).at[:, 130].set(NEVER)
    best = jnp.asarray([[3, 4], [3, 699], [299, 300], [0, 128], [640, 641], [5, 500]])
    logits = logits.at[jnp.arange(L)[:, None], best].set(jnp.asarray([9.0, 9.0]))
    logits = logits.at[0, 4].set(8.5).at[1, 699].set(9.5)
    canvas, eos, half = jnp.asarray([3, 699, 130, 128, 0, 400]), jnp.asarray(641), jnp.full(L, 0.5)
    got = joined(cuts, logits, canvas, eos, half, half, jnp.asarray(0.0))
    want = token_stats(logits, canvas, draw(logits, half, jnp.asarray(0.0)), eos)
    np.testing.assert_array_equal(got.argmax, [3, 699, 299, 0, 640, 5])
    for name, a, b in zip(want._fields, got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_of_pieces_have_the_probabilities_of_the_whole(temperature):
    """Over a grid of both uniforms: each id as often as its probability says, to the grid's fineness."""
    logits, n = logits_of()[:1, :40], 150
    grid = (jnp.arange(n) + 0.5) / n
    each = jnp.stack([x.reshape(-1, 1) for x in jnp.meshgrid(grid, grid)])
    one = lambda u, v: joined(
        (0, 10, 32, 40), logits, jnp.zeros(1, int), jnp.asarray(-1), u, v, jnp.asarray(temperature)
    )
    got = jax.vmap(one)(*each)
    share = np.bincount(np.asarray(got.sample[:, 0]), minlength=40) / n**2
    p = np.asarray(jax.nn.softmax(logits[0] / temperature))
    np.testing.assert_allclose(share, p, atol=2.5 / n)
    at = np.asarray(jax.nn.softmax(logits[0]))[np.asarray(got.sample[:, 0])]
    np.testing.assert_allclose(got.p_sample[:, 0], at, rtol=1e-4)


@functools.cache
def conditioned():
    """A Gemma with self-conditioning, whose next pass depends on all probabilities of this one."""
    config = GemmaConfig(
        vocab=97,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        block=8,
        window=8,
        global_layers=(1,),
        global_head_dim=8,
        global_kv_heads=1,
        self_conditioning=True,
        context=64,
        pad=0,
        eos=1,
        softcap=5.0,
    )
    model = models.build(config)
    params = jax.tree.map(lambda x: 4 * x, model.init(jax.random.key(3)))
    return LM(model, params, None, noise.build(NoiseConfig(kind="uniform"), 97, None))


def session_of(lm, sampler, rows=2):
    prompts = [Prompt([2, 3, 4 + i], False) for i in range(rows)]
    return start(lm, Request(sampler=sampler, plan=mj.Plan(steps=4), rows=rows_of(prompts, 12, 0)))


def passes(lm, session, piece, count=3, logit_bytes=0):
    program = session.config._replace(predict=ChunkedVocab(piece, logit_bytes))
    state, frames = session.state, []
    step = jax.jit(functools.partial(program.method.step, program))
    for _ in range(count):
        state, frame = step(lm.params, state)
        frames.append(frame)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *frames)


SHAPERS = (
    processors.cooling(),
    processors.bias({7: 2.0, 60: 3.0, 96: -1.0}),
    processors.ban([5, 61]),
    processors.repetition(1.3),
    processors.presence(0.4),
    processors.frequency(0.3),
)
BITS = np.random.default_rng(0).integers(0, 2**32, (6, 4), dtype=np.uint32)
ALLOWS = (processors.allow({2: [40, 41, 96], 9: [3]}), processors.allow_bits(BITS, 3))


@pytest.mark.slow
@pytest.mark.parametrize("logit_bytes", [0, 2**29], ids=["chunk by chunk", "one product"])
def test_a_model_decodes_in_pieces_as_with_all_logits(logit_bytes):
    """Every logits processor that may be given a part; the last piece is shorter, and chunks begin within words of
    bits."""
    piece = 24
    lm, sampler = conditioned(), Sampler(mj.rules.entropy_bound(), SHAPERS, temperature=0.0, allow=ALLOWS)
    session = session_of(lm, sampler)
    assert ChunkedVocab(piece).applies(session.config, session.state.sampling.sampler)
    assert not ChunkedVocab().applies(session.config, session.state.sampling.sampler)
    got, shown = passes(lm, session, piece, logit_bytes=logit_bytes)
    want, expected = passes(lm, session, 10**6)
    for a, b in zip(jax.tree.leaves((shown, got.self_cond)), jax.tree.leaves((expected, want.self_cond))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-5)


@pytest.mark.long
def test_samples_do_not_depend_on_whether_one_product_computes_the_logits():
    lm = conditioned()
    session = session_of(lm, Sampler(mj.rules.entropy_bound(), temperature=1.0))
    (got, shown), (want, expected) = (passes(lm, session, 24, logit_bytes=n) for n in (2**29, 0))
    np.testing.assert_array_equal(shown.answer, expected.answer)
    np.testing.assert_allclose(got.self_cond, want.self_cond, rtol=1e-4, atol=1e-5)
    assert len(np.unique(np.asarray(shown.answer))) > 10


@pytest.mark.parametrize("tied", [True, False])
def test_a_part_of_the_logits_is_a_part_of_all(tied):
    """Of our transformer, and of the same under guidance."""
    config = dataclasses.replace(tiny().model.config, tied=tied, layers=1)
    model = models.build(config)
    params, other = model.init(KEY), jax.random.normal(KEY, (2, 3, 16))
    hidden = jnp.flip(other)
    steered = guidance.GuidedHidden(hidden, other, jnp.full((2, 3, 1), 0.7))
    for m, x in ((model, hidden), (guidance.guided(model), steered)):
        assert m.head_chunk is not None
        np.testing.assert_allclose(
            m.head_chunk(params, x, 30, 50), m.head(params, x)[..., 30:80], rtol=1e-5, atol=1e-6
        )
        ids = jnp.asarray([5, 80, 7, 319])
        values = jax.random.randint(KEY, (config.vocab, 16), -127, 128, jnp.int8)
        table = QuantisedWeight(values, jnp.linspace(0.01, 0.1, config.vocab))
        for given in (params, params | {"embed" if tied else "head": table}):
            part, whole = m.head_chunk(given, x, ids, 4), m.head(given, x)
            np.testing.assert_allclose(part, whole[..., ids], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_no_array_of_all_logits_is_made_unless_it_is_small():
    """The largest float of a step has a piece's ids, not the vocabulary's; with a truncation it has all."""
    lm = conditioned()

    def widest(sampler, logit_bytes=0):
        session = session_of(lm, sampler)
        config = session.config._replace(predict=ChunkedVocab(32, logit_bytes))
        made = jax.make_jaxpr(functools.partial(config.method.step, config))
        jaxpr = made(lm.params, session.state)
        shapes = [v.aval for e in every(jaxpr.jaxpr) for v in e.outvars]
        floats = [a.shape for a in shapes if jnp.issubdtype(a.dtype, jnp.floating)]
        return max(s[-1] for s in floats if len(s) > 1 and s[:-1] != (97,) and s[-1] <= 97)

    bound = mj.rules.entropy_bound()
    assert widest(Sampler(bound, SHAPERS[:1])) < 97
    assert widest(Sampler(bound, (processors.top_p(0.9),))) == 97
    small = 4 * 2 * 8 * 97  # two rows of a block
    assert widest(Sampler(bound), small - 1) < 97 == widest(Sampler(bound), small)


def every(jaxpr):
    """All equations of a jaxpr, those of inner ones too."""
    for e in jaxpr.eqns:
        yield e
        for inner in jax.tree.leaves(list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from every(inner)


def test_parts_that_say_nothing_are_given_all_logits():
    """A user's own rule, logits processor and stop may look at whatever a view has."""

    @rule
    def own(key, view, memory):
        return accept(view, view.logits.max(-1) > 0), memory

    @logits_processor
    def mine(logits, view):
        return logits - logits.mean(-1, keepdims=True)

    for sampler in (Sampler(own()), Sampler(mj.rules.entropy_bound(), (mine(),))):
        session = session_of(conditioned(), sampler)
        assert not ChunkedVocab(8).applies(session.config, session.state.sampling.sampler)
